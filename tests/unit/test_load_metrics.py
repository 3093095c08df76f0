"""Figures of a cell, exactly, from records made up for the purpose."""

from __future__ import annotations

import dataclasses

import pytest

from serving.load.metrics import (
    cell_metrics,
    in_flight_max,
    lag_flag,
    plausibility,
    tpot_ns,
    ttft_ns,
)
from serving.load.records import RequestRecord

MS = 1_000_000


def record(
    sent_ms: float,
    chunks_ms: list[float],
    counts: list[int] | None = None,
    *,
    end_ms: float | None = None,
    **changes: object,
) -> RequestRecord:
    counts = [1] * len(chunks_ms) if counts is None else counts
    base = RequestRecord(
        request_id="r",
        role="measured",
        endpoint=None,
        state="complete",
        reason="",
        http_status=200,
        finish_reason="length",
        prompt_tokens=10,
        completion_tokens=sum(counts),
        completion_tokens_source="usage",
        token_rule="continuous_usage",
        intended_ns=int(sent_ms * MS),
        sent_ns=int(sent_ms * MS),
        end_ns=int((chunks_ms[-1] if end_ms is None else end_ms) * MS),
        chunk_ns=tuple(int(ms * MS) for ms in chunks_ms),
        chunk_tokens=tuple(counts),
    )
    return dataclasses.replace(base, **changes)


def test_known_times_give_known_figures():
    records = [
        record(0, [50, 60, 70], end_ms=71),
        record(0, [30, 50], [2, 4], prompt_tokens=12),
        record(0, [1], role="warmup"),
        record(0, [2], state="failed", reason="stream ended without [DONE]"),
    ]
    metrics = cell_metrics(records, wall_ns=100 * MS, concurrency=2)
    assert (metrics.ok, metrics.total) == (2, 3)
    assert metrics.ttft_p50_ms == 40
    assert metrics.ttft_p95_ms == pytest.approx(49)
    assert metrics.ttft_p99_ms == pytest.approx(49.8)
    # TPOT: 20 / 2 and 20 / 4. Gaps: 10, 10, 20. ITL: 10, 10 and 20 / 4 four times.
    assert metrics.tpot_p50_ms == 7.5
    assert metrics.chunk_gap_p99_ms == pytest.approx(19.8)
    assert metrics.itl_p50_ms == 5
    assert metrics.itl_p99_ms == 10
    assert metrics.e2e_p50_ms == 60.5
    assert metrics.output_tokens_per_s == pytest.approx(90)
    assert metrics.requests_per_s == pytest.approx(20)
    assert (metrics.prompt_tokens_min, metrics.prompt_tokens_max) == (10, 12)


def test_cancelled_requests_are_counted_and_are_in_no_figure():
    """Two tokens of two are in the rates; the cancelled one's five and its TTFT are not."""
    whole = [record(0, [10, 20]), record(20, [40, 50])]
    given_up = record(20, [21, 22], [2, 3], state="aborted", reason="cancelled by the client")
    stopped = record(20, [21], state="aborted", reason="stopped by the client")
    metrics = cell_metrics([*whole, given_up, stopped], wall_ns=50 * MS, concurrency=1)
    assert (metrics.ok, metrics.total, metrics.cancelled) == (2, 4, 1)
    assert (metrics.ttft_p50_ms, metrics.tpot_p50_ms, metrics.itl_p50_ms) == (15, 10, 10)
    assert metrics.e2e_p50_ms == 25
    assert metrics.output_tokens_per_s == pytest.approx(4 / 0.050)
    assert metrics.requests_per_s == pytest.approx(2 / 0.050)


def test_steady_rate_counts_between_the_cth_completion_and_the_last_request_sent():
    records = [
        record(0, [5, 10]),
        record(0, [10, 20]),  # the second completion, at 20
        record(10, [20, 21, 30]),  # two tokens after 20
        record(20, [25, 40, 41], [3, 4, 1]),
        record(40, [50]),  # the last one sent, at 40
    ]
    metrics = cell_metrics(records, wall_ns=50 * MS, concurrency=2)
    assert metrics.steady_tokens_per_s == pytest.approx((2 + 3 + 4) / 0.020)


def test_nothing_defined_gives_none_and_not_zero():
    metrics = cell_metrics([record(0, [5], state="failed")], wall_ns=0, concurrency=1)
    values = dataclasses.asdict(metrics)
    assert (values.pop("ok"), values.pop("total"), values.pop("cancelled")) == (0, 1, 0)
    assert set(values.values()) == {None}
    one = cell_metrics([record(0, [5], [4])], wall_ns=5 * MS, concurrency=1)
    assert (one.tpot_p50_ms, one.itl_p50_ms, one.steady_tokens_per_s) == (None, None, None)
    assert one.ttft_p50_ms == 5


def test_per_request_times():
    r = record(10, [15, 45], [2, 3])
    assert (ttft_ns(r), tpot_ns(r)) == (5 * MS, 10 * MS)
    assert ttft_ns(dataclasses.replace(r, sent_ns=None)) is None
    assert tpot_ns(record(0, [5], [3])) is None


def test_in_flight_max_lets_one_end_as_another_starts():
    assert in_flight_max([(0, 10), (10, 20), (5, 12)]) == 2
    assert in_flight_max([]) == 0


def test_the_lag_flag_takes_the_larger_limit():
    assert not lag_flag(1 * MS, None)
    assert lag_flag(1 * MS + 1, 20.0)
    assert not lag_flag(2 * MS, 40.0)
    assert lag_flag(2 * MS + 1, 40.0)


def loop(count: int, latency_ms: int, pause_ms: int = 0) -> list[RequestRecord]:
    """A closed loop of two slots, each with a pause between its requests."""
    step = latency_ms + pause_ms
    starts = [i // 2 * step for i in range(count)]
    return [record(s, [s + latency_ms / 2, s + latency_ms]) for s in starts]


def test_a_sound_cell_is_plausible():
    assert plausibility(loop(20, 100), concurrency=2) == ""
    assert plausibility(loop(20, 100, pause_ms=4), concurrency=2) == ""
    assert plausibility([], concurrency=2) == ""


def test_each_finding_is_put_in_words():
    idle = plausibility(loop(20, 100, pause_ms=10), concurrency=2)
    assert idle == "requests in flight on average: 1.81818, expected 2"
    lost = [dataclasses.replace(r, completion_tokens=3) for r in loop(20, 100)]
    assert "tokens in chunks against the server's count: 40, expected 60" in plausibility(lost, 2)
    late = [record(0, [10, 20], end_ms=40)]
    assert (
        plausibility(late, 2) == "TTFT + TPOT x tokens against latency, ms in all: 20, expected 40"
    )
    bunched = [record(0, [10, 10, 20])]
    assert plausibility(bunched, 2) == (
        "50% of chunks came in one read with the chunk before: ITL blurred"
    )
