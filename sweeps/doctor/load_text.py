"""What `doctor load` found, in sentences and tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from statistics import median

from sweeps.doctor.load import Measured, Run
from sweeps.tablefmt import Section, Table, text_table

KEEPS_UP = 0.95  # of the ideal rate
_BUSY = 0.9  # of a core: it is what limits


def keeps_up(measured: Measured) -> bool:
    """Whether no request failed and every paced run with the client alone held the pace."""
    paced = [run.of_ideal for run in measured.runs if run.of_ideal is not None and not run.routed]
    return not any(run.failed for run in measured.runs) and min(paced, default=0.0) >= KEEPS_UP


def sections(measured: Measured) -> list[Section]:
    """Sentences first, then the figures behind them and what they were measured with."""
    cells = [list(runs) for _, runs in groupby(measured.runs, key=lambda run: run.cell)]
    return [
        Section("What the instrument adds", tuple(_sentences(cells))),
        Section("Medians over runs", (_clients(cells), _routers(cells))),
        Section("Measured with", tuple(_conditions(measured))),
    ]


def _sentences(cells: Sequence[Sequence[Run]]) -> Iterator[str]:
    for runs in cells:
        yield from _failures(runs)
        direct, routed = _sides(runs)
        if direct[0].of_ideal is not None:
            yield _paced(direct, routed)
        else:
            yield _fastest(direct, routed)


def _failures(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.failed:
            through = "through the router" if run.routed else "without the router"
            yield f"{run.cell}, {through}: {run.failed} requests failed, the first: {run.reason}"


def _paced(direct: Sequence[Run], routed: Sequence[Run]) -> str:
    share = _median(direct, lambda run: run.of_ideal or 0.0)
    holds = "holds the pace" if share >= KEEPS_UP else "DOES NOT HOLD THE PACE"
    remedy = "" if share >= KEEPS_UP else ": spread the load over more clients"
    added_p50, added_p99 = _added(direct, routed)
    return (
        f"{direct[0].cell}: the client sees a first token "
        f"{_median(direct, lambda run: run.ttft_error_p50_ms):.2f} ms late at the median and "
        f"{_median(direct, lambda run: run.ttft_error_p99_ms):.2f} ms at p99, and {holds} "
        f"({share:.1%} of the ideal rate){remedy}. The router adds {added_p50:.2f} ms to TTFT p50 "
        f"and {added_p99:.2f} ms to p99."
    )


def _fastest(direct: Sequence[Run], routed: Sequence[Run]) -> str:
    one = _is_one_token(direct)
    rates = [_median(runs, lambda run: _rate(run, one)) for runs in (direct, routed)]
    return (
        f"{direct[0].cell}, no delay: {rates[0]:,.0f} {_unit(one)} without the router, where "
        f"{_limit(direct)}; {rates[1]:,.0f} through it, where {_limit(routed)}."
    )


def _limit(runs: Sequence[Run]) -> str:
    busy = {
        "the engine": _median(runs, lambda run: run.engine_busy),
        "the client": _median(runs, lambda run: run.client_busy),
        "the router": _median(runs, lambda run: run.router_busy or 0.0),
    }
    who = max(busy, key=lambda name: busy[name])
    share = min(1.0, busy[who])
    return f"{who} {'limits' if share >= _BUSY else 'is the busiest'} ({share:.0%} of a core)"


def _clients(cells: Sequence[Sequence[Run]]) -> Table:
    columns = ("client alone", "TTFT error p50 ms", "p99 ms", "ITL p50 ms", "of the ideal",
               "tok/s", "req/s", "loop lag p99 ms", "CPU ms per 1k tokens")  # fmt: skip
    rows = []
    for runs in cells:
        direct, _ = _sides(runs)
        paced = direct[0].of_ideal is not None
        rows.append(
            (
                direct[0].cell,
                f"{_median(direct, lambda r: r.ttft_error_p50_ms):.3f}" if paced else "",
                f"{_median(direct, lambda r: r.ttft_error_p99_ms):.3f}" if paced else "",
                f"{_median(direct, lambda r: r.itl_p50_ms or 0.0):.3f}" if paced else "",
                f"{_median(direct, lambda r: r.of_ideal or 0.0):.3f}" if paced else "",
                f"{_median(direct, lambda r: r.tokens_per_s):,.0f}",
                f"{_median(direct, lambda r: r.requests_per_s):,.0f}",
                f"{_median(direct, lambda r: r.client_lag_p99_ms):.2f}",
                f"{_median(direct, lambda r: _per_1k(r.client_busy, r)):.1f}",
            )
        )
    return text_table("", columns, rows)


def _routers(cells: Sequence[Sequence[Run]]) -> Table:
    columns = ("through the router", "added TTFT p50 ms", "p99 ms", "ITL p50 ms", "tok/s",
               "req/s", "router's CPU ms per 1k tokens")  # fmt: skip
    rows = []
    for runs in cells:
        direct, routed = _sides(runs)
        paced = direct[0].of_ideal is not None
        p50, p99 = _added(direct, routed)
        rows.append(
            (
                direct[0].cell,
                f"{p50:.3f}" if paced else "",
                f"{p99:.3f}" if paced else "",
                f"{_median(routed, lambda r: r.itl_p50_ms or 0.0):.3f}" if paced else "",
                f"{_median(routed, lambda r: r.tokens_per_s):,.0f}",
                f"{_median(routed, lambda r: r.requests_per_s):,.0f}",
                f"{_median(routed, lambda r: _per_1k(r.router_busy or 0.0, r)):.1f}",
            )
        )
    return text_table("", columns, rows)


def _conditions(measured: Measured) -> Iterator[str]:
    before, after = measured.load_average
    seats = ", ".join(f"{name} on core {core}" for name, core in measured.cores.items())
    repeats = len(measured.runs) // (2 * len({run.cell for run in measured.runs}))
    yield (
        f"{seats}; {repeats} runs each with and without the router, in turn; load average "
        f"{before:.1f} before, {after:.1f} after."
    )
    shared = len(set(measured.cores.values())) < len(measured.cores)
    if shared:
        yield (
            "There are fewer cores than processes: those that share one wait for each other, so "
            "that what the router adds here is more than it is."
        )


def _sides(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    return [run for run in runs if not run.routed], [run for run in runs if run.routed]


def _added(direct: Sequence[Run], routed: Sequence[Run]) -> tuple[float, float]:
    """Median over pairs of runs of what the router adds to TTFT p50 and p99, ms."""
    pairs = list(zip(direct, routed, strict=True))
    return (
        median(there.ttft_p50_ms - here.ttft_p50_ms for here, there in pairs),
        median(there.ttft_p99_ms - here.ttft_p99_ms for here, there in pairs),
    )


def _is_one_token(runs: Sequence[Run]) -> bool:
    return all(run.tokens_per_s == run.requests_per_s for run in runs)


def _rate(run: Run, one_token: bool) -> float:
    return run.requests_per_s if one_token else run.tokens_per_s


def _unit(one_token: bool) -> str:
    return "requests/s" if one_token else "tokens/s"


def _per_1k(busy: float, run: Run) -> float:
    """CPU milliseconds per 1,000 tokens of a process that is `busy` that share of its time."""
    return busy / run.tokens_per_s * 1e6 if run.tokens_per_s else 0.0


def _median(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
    return median(of(run) for run in runs)
