"""Metrics of one serving cell from its raw requests.

Latencies are over complete measured requests; times are monotonic nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sweeps.stats import percentile

_MS = 1e-6
_SECOND = 1e9


class Request(Protocol):
    """What is read of a request; the names are the columns of the `requests` table."""

    @property
    def role(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def completion_tokens(self) -> int | None: ...
    @property
    def sent_ns(self) -> int | None: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def chunk_ns(self) -> Sequence[int]: ...
    @property
    def chunk_tokens(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class CellMetrics:
    """What a cell measured; None where it is undefined (no complete request, one chunk, ...).

    `chunk_gap_p99_ms` is the p99 over the gaps between token-carrying chunks, which is what the
    published tables call ITL p99; `itl_*` spreads each gap over the tokens of its chunk.
    """

    ok: int
    total: int
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


def cell_metrics(records: Sequence[Request], wall_ns: int, concurrency: int) -> CellMetrics:
    """Metrics over the measured requests among `records`.

    Args:
        records: Requests of one cell, of any role.
        wall_ns: Wall time of the measured part of the cell.
        concurrency: Requests in flight that the cell asked for.
    """
    measured = [r for r in records if r.role == "measured"]
    done = [r for r in measured if r.state == "complete"]
    ttft = [_since_sent(r, r.chunk_ns[0]) for r in done if r.chunk_ns]
    e2e = [_since_sent(r, r.end_ns) for r in done]
    gaps, itl = _gaps_ms(done)
    prompts = [r.prompt_tokens for r in done if r.prompt_tokens is not None]
    tokens = sum(r.completion_tokens or 0 for r in done)
    wall_s = wall_ns / _SECOND
    return CellMetrics(
        ok=len(done),
        total=len(measured),
        ttft_p50_ms=percentile(ttft, 50),
        ttft_p95_ms=percentile(ttft, 95),
        ttft_p99_ms=percentile(ttft, 99),
        tpot_p50_ms=percentile([t for r in done if (t := _tpot_ms(r)) is not None], 50),
        chunk_gap_p99_ms=percentile(gaps, 99),
        itl_p50_ms=percentile(itl, 50),
        itl_p99_ms=percentile(itl, 99),
        e2e_p50_ms=percentile(e2e, 50),
        output_tokens_per_s=tokens / wall_s if wall_ns > 0 else None,
        steady_tokens_per_s=_steady_tokens_per_s(measured, concurrency),
        requests_per_s=len(done) / wall_s if wall_ns > 0 else None,
        prompt_tokens_min=min(prompts, default=None),
        prompt_tokens_max=max(prompts, default=None),
    )


def _since_sent(request: Request, at_ns: int) -> float:
    """Milliseconds from t0 of a complete request.

    Raises:
        ValueError: The record says complete, but also that nothing was ever sent.
    """
    if request.sent_ns is None:
        raise ValueError("a complete request has no sent_ns: the requests table is inconsistent")
    return (at_ns - request.sent_ns) * _MS


def _tpot_ms(request: Request) -> float | None:
    if not request.chunk_ns:
        return None
    later = (request.completion_tokens or 0) - request.chunk_tokens[0]
    if later <= 0:
        return None
    return (request.chunk_ns[-1] - request.chunk_ns[0]) * _MS / later


def _gaps_ms(requests: Sequence[Request]) -> tuple[list[float], list[float]]:
    """Gaps between chunks, and the same gaps spread over each chunk's tokens."""
    gaps: list[float] = []
    itl: list[float] = []
    for request in requests:
        gap = np.diff(np.asarray(request.chunk_ns, dtype=np.int64)) * _MS
        count = np.asarray(request.chunk_tokens[1:], dtype=np.int64)
        gaps.extend(gap.tolist())
        itl.extend(np.repeat(gap / np.maximum(count, 1), count).tolist())
    return gaps, itl


def _steady_tokens_per_s(measured: Sequence[Request], concurrency: int) -> float | None:
    """Token rate between the c-th completion and the last request sent; None without such time."""
    done = [r for r in measured if r.state == "complete"]
    ends = sorted(r.end_ns for r in done)
    sent = [r.sent_ns for r in measured if r.sent_ns is not None]
    if len(ends) < concurrency or max(sent) <= ends[concurrency - 1]:
        return None
    start, stop = ends[concurrency - 1], max(sent)
    chunks = [c for r in done for c in zip(r.chunk_ns, r.chunk_tokens, strict=True)]
    tokens = sum(n for at, n in chunks if start < at <= stop)
    return tokens / ((stop - start) / _SECOND)
