"""Metrics of a serving cell, from rows of its table, against values worked out by hand."""

from __future__ import annotations

from typing import Any

from serving.load.metrics import CellMetrics, cell_metrics
from sweeps.view import request_record

SECOND = 1_000_000_000


def _metrics(
    rows: list[dict[str, Any]], wall_ns: int = SECOND, concurrency: int = 1
) -> CellMetrics:
    return cell_metrics([request_record(row) for row in rows], wall_ns, concurrency)


def test_a_chunk_gap_counts_once_and_itl_once_for_each_token(results: Any) -> None:
    found = _metrics([results.request(0, [10, 50], [1, 4])])
    assert found.chunk_gap_p99_ms == 40
    assert (found.itl_p50_ms, found.itl_p99_ms) == (10, 10)
    assert found.tpot_p50_ms == 10


def test_tpot_is_undefined_when_the_first_chunk_holds_all_tokens(results: Any) -> None:
    found = _metrics([results.request(0, [10], [16])])
    assert (found.ttft_p50_ms, found.tpot_p50_ms, found.chunk_gap_p99_ms) == (10, None, None)
    assert found.output_tokens_per_s == 16


def test_the_steady_rate_is_between_the_cth_completion_and_the_last_request_sent(
    results: Any,
) -> None:
    rows = [
        results.request(0, [100, 200], [1, 1]),
        results.request(0, [100, 400], [1, 1]),  # the second completion: at 400 ms
        results.request(200, [300, 500, 600], [1, 2, 1]),  # 3 tokens inside
        results.request(600, [700, 900], [1, 1]),  # the last one sent: at 600 ms
    ]
    found = _metrics(rows, concurrency=2)
    assert found.steady_tokens_per_s == 3 / 0.2
    assert found.e2e_p50_ms == 350  # 200 400 400 300
    assert _metrics(rows[:1], concurrency=2).steady_tokens_per_s is None
    assert _metrics(rows[:2], concurrency=2).steady_tokens_per_s is None


def test_failed_unsent_and_other_roles_change_the_counts_and_no_latency(results: Any) -> None:
    good = results.request(0, [10, 20], [1, 1])
    found = _metrics(
        [
            good,
            results.request(0, [500], [1], state="failed"),
            results.request(0, [], [], state="failed", sent_ns=None, completion_tokens=None),
            results.request(0, [900, 990], [1, 1], role="calibration"),
        ]
    )
    assert (found.ok, found.total) == (1, 3)
    assert (found.ttft_p50_ms, found.ttft_p99_ms, found.output_tokens_per_s) == (10, 10, 2)


def test_a_cell_without_a_complete_request_has_no_latency(results: Any) -> None:
    found = _metrics([results.request(0, [], [], state="failed", sent_ns=None)], wall_ns=0)
    assert (found.ok, found.total, found.ttft_p50_ms, found.requests_per_s) == (0, 1, None, None)
    assert (found.steady_tokens_per_s, found.prompt_tokens_min) == (None, None)
