"""How every reported figure is defined: printed with each full report."""

from __future__ import annotations

from sweeps.tablefmt import Section, text_table
from sweeps.view import View

_ALL_TO_ALL = (
    (
        "iteration",
        "L2 flush (GPU), barrier over all ranks, a fixed spin that hides launch skew, then the "
        "operation between two events; dispatch, combine and the pair are timed apart",
    ),
    (
        "headline",
        "maximum over ranks of each iteration, then the median over iterations; not the maximum "
        "of the ranks' medians, which is lower",
    ),
    ("pooled", "percentiles over all ranks and iterations, as published tables have them"),
    ("rank p50", "least and greatest of the ranks' own medians"),
    (
        "warm-up",
        "same operation and peers, until the median of a window of 20 settles within the "
        "tolerance; never in the figures",
    ),
    ("cold, floor", "first iteration, slowest rank; median empty event. Nothing is subtracted"),
    (
        "bound",
        "bytes that must cross the busiest link / its rate measured in the same run; "
        "`x bound` is the headline over it",
    ),
    (
        "wire bytes",
        "most that a rank sends or receives, and of all ranks; own share excluded",
    ),
    ("wire GB/s", "most bytes that a rank sends or receives / headline"),
    (
        "algbw, busbw",
        "nccl-tests' names: busbw is the mean bytes that a rank sends to others / headline; "
        "algbw counts its own share too, busbw x n / (n - 1)",
    ),
    ("imbalance", "most rows received by a rank / mean over ranks"),
    (
        "checked",
        "before timing: received rows are exactly the expected ones, counts match, and combine "
        "equals an fp64 reference; a backend that fails has no latency",
    ),
)
_SERVING = (
    (
        "load",
        "closed loop at concurrency c: never more than c requests in flight, and exactly c while "
        "any remain; open loop (`req/s`): sent at times drawn beforehand, whatever the server "
        "does; warm-up and calibration requests are kept apart",
    ),
    (
        "clock",
        "one monotonic clock in the client: t0 just before a request's first byte is written, one "
        "stamp for each read",
    ),
    (
        "token",
        "a chunk carries tokens where the server's running usage rose, else where it has token "
        "ids, else text; a role, usage or empty finish chunk carries none",
    ),
    (
        "complete",
        "HTTP 200, no error event, a finish reason and the end marker; all else failed. Latencies "
        "are over complete measured requests",
    ),
    (
        "cancelled",
        "where the load asks for it, the client closes the connection at the first read with so "
        "many tokens; the same requests in every arm. No failure, and in no latency and no rate; "
        "the time that they took is in the cell's wall time",
    ),
    ("percentiles", "linear interpolation over all values of a cell"),
    ("TTFT", "t0 to the first chunk that carries a token"),
    ("TPOT", "(last token - first) / (completion tokens - tokens in the first chunk), per request"),
    ("chunk gap", "time between token-carrying chunks; published tables call its p99 `ITL p99`"),
    ("ITL", "chunk gap / tokens in the chunk, counted once for each of them"),
    ("latency", "t0 to the end of the response"),
    ("tok/s", "completion tokens of complete requests / wall time of the cell"),
    ("steady tok/s", "tokens between the c-th completion and the last request sent / that time"),
    (
        "client lag",
        "p99 lateness of a 5 ms heartbeat on the client's loop; flagged above 1 ms and above 5 % "
        "of the ITL p50",
    ),
    (
        "plausibility",
        "flagged where more than 5 % off: requests in flight against c (Little's law), tokens in "
        "chunks against usage, TTFT + TPOT x tokens against latency; or where chunks share reads",
    ),
    (
        "ledger",
        "for each rank: sent by the client, forwarded by the router, completed by the engine's own "
        "counter; a cell in which they disagree has failed; behind `vllm_router` only the sums of "
        "client and engines compare. Of requests that the client cancelled, the router aborted as "
        "many, and the engine completed or aborted no more",
    ),
)
_BOTH = (
    (
        "transport",
        "`proved`: only what was asked for was seen (faster links inside a TP group aside), in the "
        "library's log or by bytes on interfaces; `contradicted`: something else was; "
        "`unproved`: nothing was; `observed`: nothing was asked for; `not applicable`: nothing "
        "crosses",
    ),
    (
        "ratio",
        "median of the ratios of paired repeats with a bootstrap 95 % interval; one run is shown "
        "as one run",
    ),
    (
        "verdict",
        "from 6 paired repeats on: that interval excludes 1, and the sign-flip test over the pairs "
        "has p at most 0.05 (serving only)",
    ),
)
_MEASURES = (("a2a", "All-to-all", _ALL_TO_ALL), ("serving", "Serving", _SERVING))


def sections(view: View) -> list[Section]:
    """Definitions of what this sweep measured."""
    tables = [
        text_table(title, ("what", "how"), rows)
        for measure, title, rows in _MEASURES
        if view.of(measure)
    ]
    both = text_table("Evidence and comparison", ("what", "how"), _BOTH)
    return [Section("How it was measured", (*tables, both))]
