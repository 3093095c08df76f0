"""Figures of a serving cell, from its request records. Definitions: `docs/measuring.md`.

Latency figures and rates use complete measured requests only; the counts beside them say how
many were not, and how many of those were cancelled on purpose. Percentiles interpolate linearly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.load.records import CellRecord, RequestRecord

_NS_PER_MS = 1e6
_NS_PER_S = 1e9
_TOLERANCE = 0.05
_LAG_FLOOR_MS = 1.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CellMetrics:
    """Figures of one cell; None where nothing defines them.

    Attributes:
        ok: Complete measured requests.
        total: Measured requests with any outcome.
        cancelled: Those that the client gave up as the load asks; no figure counts their tokens.
        ttft_p50_ms: t0 to the first chunk that carries a token; likewise p95 and p99.
        tpot_p50_ms: (last - first token) / (tokens - tokens in the first chunk), per request.
        chunk_gap_p99_ms: Gaps between token-carrying chunks, pooled over the cell. Published
            tables call this ITL p99.
        itl_p50_ms: Gap / tokens of its chunk, counted once per token; likewise p99.
        e2e_p50_ms: t0 to the end of the response.
        output_tokens_per_s: Completion tokens / wall time.
        steady_tokens_per_s: Tokens received between the c-th completion and the last request
            sent / that time.
        requests_per_s: Complete requests / wall time.
        prompt_tokens_min: Shortest prompt as the server counted it; likewise the longest.
    """

    ok: int
    total: int
    cancelled: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    chunk_gap_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    e2e_p50_ms: float | None
    output_tokens_per_s: float | None
    steady_tokens_per_s: float | None
    requests_per_s: float | None
    prompt_tokens_min: int | None
    prompt_tokens_max: int | None


def cell_metrics(records: Sequence[RequestRecord], wall_ns: int, concurrency: int) -> CellMetrics:
    """Figures of a cell.

    Args:
        records: All its records; other roles than `measured` are left out here.
        wall_ns: `CellRecord.wall_ns`.
        concurrency: Requests in flight that the cell asked for; 0 for an open loop.
    """
    measured = [record for record in records if record.role == "measured"]
    ok = [record for record in measured if record.state == "complete"]
    ttft = np.array([ns for r in ok if (ns := ttft_ns(r)) is not None]) / _NS_PER_MS
    tpot = np.array([gap for r in ok if (gap := tpot_ns(r)) is not None]) / _NS_PER_MS
    gaps, counts = chunk_gaps(ok)
    itl = np.repeat(gaps / np.maximum(counts, 1), counts)
    e2e = np.array([_latency_ns(r) for r in ok]) / _NS_PER_MS
    tokens = sum(r.completion_tokens or 0 for r in ok)
    prompts = [r.prompt_tokens for r in ok if r.prompt_tokens is not None]
    return CellMetrics(
        ok=len(ok),
        total=len(measured),
        cancelled=sum(record.cancelled for record in measured),
        ttft_p50_ms=_percentile(ttft, 50),
        ttft_p95_ms=_percentile(ttft, 95),
        ttft_p99_ms=_percentile(ttft, 99),
        tpot_p50_ms=_percentile(tpot, 50),
        chunk_gap_p99_ms=_percentile(gaps, 99),
        itl_p50_ms=_percentile(itl, 50),
        itl_p99_ms=_percentile(itl, 99),
        e2e_p50_ms=_percentile(e2e, 50),
        output_tokens_per_s=_per_s(tokens, wall_ns),
        steady_tokens_per_s=_steady_tokens_per_s(measured, concurrency),
        requests_per_s=_per_s(len(ok), wall_ns),
        prompt_tokens_min=min(prompts, default=None),
        prompt_tokens_max=max(prompts, default=None),
    )


def ttft_ns(record: RequestRecord) -> int | None:
    """Time to first token; None where no token came."""
    if record.sent_ns is None or not record.chunk_ns:
        return None
    return record.chunk_ns[0] - record.sent_ns


def tpot_ns(record: RequestRecord) -> float | None:
    """Time per output token after the first chunk; None where the first chunk has them all."""
    if not record.chunk_ns or record.completion_tokens is None:
        return None
    later = record.completion_tokens - record.chunk_tokens[0]
    return (record.chunk_ns[-1] - record.chunk_ns[0]) / later if later > 0 else None


def chunk_gaps(records: Sequence[RequestRecord]) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Gaps before each token-carrying chunk but the first, pooled over requests.

    Returns:
        Gaps in ms and the token counts of the chunks that end them, both of shape [gaps].
    """
    gaps = [np.diff(np.array(r.chunk_ns, dtype=np.int64)) for r in records]
    counts = [np.array(r.chunk_tokens[1:], dtype=np.int64) for r in records]
    if not records:
        return np.empty(0), np.empty(0, dtype=np.int64)
    return np.concatenate(gaps) / _NS_PER_MS, np.concatenate(counts)


def cell_record(
    records: list[RequestRecord],
    *,
    client_lag_p99_ns: int,
    client_cpu_ns: int,
    replaced_connections: int,
    clock_offset_ns: int,
    stopped: bool,
) -> CellRecord:
    """The record of a cell: what follows from its requests, and what is known of its client."""
    measured = [r for r in records if r.role == "measured"]
    spans = [(r.sent_ns, r.end_ns) for r in measured if r.sent_ns is not None]
    first_ns = min((sent for sent, _ in spans), default=None)
    return CellRecord(
        wall_ns=max(end for _, end in spans) - first_ns if first_ns is not None else 0,
        first_sent_ns=first_ns,
        in_flight_max=in_flight_max(spans),
        client_lag_p99_ns=client_lag_p99_ns,
        client_cpu_ns=client_cpu_ns,
        replaced_connections=replaced_connections,
        clock_offset_ns=clock_offset_ns,
        stopped=stopped,
        requests=records,
    )


def in_flight_max(spans: Sequence[tuple[int, int]]) -> int:
    """Most spans (sent_ns, end_ns) open at once; one that ends as another starts has ended."""
    events = sorted([(sent, 1) for sent, _ in spans] + [(end, -1) for _, end in spans])
    depth = np.cumsum([step for _, step in events], dtype=np.int64)
    return int(depth.max(initial=0))


def lag_flag(client_lag_p99_ns: int, itl_p50_ms: float | None) -> bool:
    """Whether the client's own lag makes the cell's latencies doubtful."""
    limit_ms = max(_LAG_FLOOR_MS, _TOLERANCE * (itl_p50_ms or 0.0))
    return client_lag_p99_ns / _NS_PER_MS > limit_ms


def plausibility(records: Sequence[RequestRecord], concurrency: int) -> str:
    """What in a cell does not fit together by more than 5 %, in words; empty if all fits.

    Checked over measured requests: Little's law between the c-th and the last request sent,
    tokens in chunks against the completion tokens reported, TTFT + TPOT x (tokens after the
    first chunk) against the latency, and whether gaps are real or hidden inside reads.
    """
    measured = [r for r in records if r.role == "measured"]
    ok = [r for r in measured if r.state == "complete"]
    findings = []
    in_flight = _mean_in_flight(measured, concurrency) if concurrency else None
    if in_flight is not None:
        findings.append(_compare("requests in flight on average", in_flight, concurrency))
    counted = sum(sum(r.chunk_tokens) for r in ok)
    reported = sum(r.completion_tokens or 0 for r in ok)
    findings.append(_compare("tokens in chunks against the server's count", counted, reported))
    explained = sum(_explained_ns(r) for r in ok) / _NS_PER_MS
    latency = sum(_latency_ns(r) for r in ok) / _NS_PER_MS
    findings.append(_compare("TTFT + TPOT x tokens against latency, ms in all", explained, latency))
    gaps, _ = chunk_gaps(ok)
    if gaps.size and (hidden := float(np.mean(gaps == 0))) > _TOLERANCE:
        findings.append(
            f"{hidden:.0%} of chunks came in one read with the chunk before: ITL blurred"
        )
    return "; ".join(finding for finding in findings if finding)


def _compare(what: str, found: float, expected: float) -> str:
    if abs(found - expected) <= _TOLERANCE * abs(expected):
        return ""
    return f"{what}: {found:.6g}, expected {expected:.6g}"


def _mean_in_flight(measured: Sequence[RequestRecord], concurrency: int) -> float | None:
    """Time average between the c-th and the last request sent, which is rate x latency there."""
    sent = sorted(r.sent_ns for r in measured if r.sent_ns is not None)
    if len(sent) <= concurrency or sent[-1] == sent[concurrency - 1]:
        return None
    start, stop = sent[concurrency - 1], sent[-1]
    shares = (
        max(0, min(r.end_ns, stop) - max(r.sent_ns, start))
        for r in measured
        if r.sent_ns is not None
    )
    return sum(shares) / (stop - start)


def _explained_ns(record: RequestRecord) -> float:
    later = (record.completion_tokens or 0) - sum(record.chunk_tokens[:1])
    return (ttft_ns(record) or 0) + (tpot_ns(record) or 0.0) * later


def _steady_tokens_per_s(measured: Sequence[RequestRecord], concurrency: int) -> float | None:
    sent = [r.sent_ns for r in measured if r.sent_ns is not None]
    ends = sorted(r.end_ns for r in measured if r.state == "complete")
    if not concurrency or len(ends) < concurrency:
        return None  # an open loop has no steady state to wait for
    start, stop = ends[concurrency - 1], max(sent)
    tokens = 0
    for record in measured:
        if record.state == "complete":
            stamps = np.array(record.chunk_ns, dtype=np.int64)
            inside = (stamps > start) & (stamps <= stop)
            tokens += int(np.array(record.chunk_tokens, dtype=np.int64)[inside].sum())
    return _per_s(tokens, stop - start)


def _latency_ns(record: RequestRecord) -> int:
    assert record.sent_ns is not None, "a complete request was sent"
    return record.end_ns - record.sent_ns


def _percentile(values: Floats, q: float) -> float | None:
    return float(np.percentile(values, q)) if values.size else None


def _per_s(count: int, duration_ns: int) -> float | None:
    return count / (duration_ns / _NS_PER_S) if duration_ns > 0 else None
