"""All-to-all tables of a sweep: headlines side by side, then everything known of each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sweeps.a2a_metrics import OPS, A2aMetrics, OpMetrics
from sweeps.report_ratio import ratio_table
from sweeps.results import Outcome, labels
from sweeps.tablefmt import Metric, Section, Table, Value, side_by_side, text_table
from sweeps.view import View

HEADLINES = (
    Metric("dispatch_us", "dispatch µs", lower_is_better=True),
    Metric("combine_us", "combine µs", lower_is_better=True),
    Metric("pair_us", "pair µs", lower_is_better=True),
)
_TIMES = (
    *("arm", "EP", "repeat", "op", "headline µs", "pooled p50", "pooled p95", "pooled p99"),
    *("rank p50 min-max", "cold", "floor", "bound µs", "ratio to bound", "wire GB/s", "iterations"),
)
_FACTS = (
    *("arm", "EP", "op", "wire bytes out max", "in max", "total", "link GB/s", "imbalance"),
    *("checked", "dedup", "layout", "graph", "timed region"),
)


def sections(view: View) -> list[Section]:
    """The all-to-all tables, or nothing when the sweep measured none."""
    grid = view.a2a
    if not grid:
        return []
    arms = labels(view.of("a2a"))
    blocks: list[Table | str] = [
        "Headline: the maximum over ranks of each iteration, then the median over iterations; "
        "with repeats, the median of those. Marked: the lowest of a row."
    ]
    for load in dict.fromkeys(load for load, _ in grid):
        cells = sorted((ep, outcomes) for (at, ep), outcomes in grid.items() if at == load)
        blocks += [_headlines(load, cells, arms), _times(load, cells), _facts(load, cells)]
    found = [Section("All-to-all", tuple(blocks))]
    if len(arms) > 1:
        short = {key: _short(outcomes) for key, outcomes in sorted(grid.items())}
        unique = len(set(short.values())) == len(short)
        rows = {short[k] if unique else f"{k[0]}, EP{k[1]}": grid[k] for k in short}
        found.append(ratio_table("All-to-all ratios", arms, HEADLINES, rows))
    return found


Cells = Sequence[tuple[int, dict[str, Outcome[A2aMetrics]]]]


def _short(outcomes: dict[str, Outcome[A2aMetrics]]) -> str:
    """What usually tells two cells apart."""
    trial = next(iter(outcomes.values())).trials[0]
    return f"{trial.phase}, {trial.routing}, EP{trial.ep}"


def _headlines(load: str, cells: Cells, arms: Sequence[str]) -> Table:
    rows = [
        (f"EP{ep}", {(arm, m.key): _value(o, m) for arm, o in outcomes.items() for m in HEADLINES})
        for ep, outcomes in cells
    ]
    return side_by_side(load, "", arms, HEADLINES, rows, metrics_outside=True)


def _value(outcome: Outcome[A2aMetrics], metric: Metric) -> Value:
    if outcome.status:
        return Value(outcome.status)
    number = outcome.median(metric.key)
    return Value("" if number is None else f"{number:.1f}", number)


def _ops(cells: Cells) -> list[tuple[str, int, int, str, OpMetrics, A2aMetrics]]:
    return [
        (arm, ep, repeat, op, metrics.ops[op], metrics)
        for ep, outcomes in cells
        for arm, outcome in outcomes.items()
        for repeat, metrics in outcome.metrics.items()
        for op in OPS
        if op in metrics.ops
    ]


def _times(load: str, cells: Cells) -> Table:
    rows = [
        (
            *(arm, f"EP{ep}", repeat, op),
            *[_us(t) for t in (m.headline_us, m.p50_us, m.p95_us, m.p99_us)],
            f"{_us(m.rank_p50_min_us)}-{_us(m.rank_p50_max_us)}",
            *[_us(t) for t in (m.cold_us, whole.floor_us, m.bound_us)],
            "" if m.ratio_to_bound is None else f"{m.ratio_to_bound:.2f}",
            None if m.wire_gb_per_s is None else f"{m.wire_gb_per_s:.3g}",
            m.iterations,
        )
        for arm, ep, repeat, op, m, whole in _ops(cells)
    ]
    return text_table(f"{load}: times", _TIMES, rows)


def _facts(load: str, cells: Cells) -> Table:
    rows = dict.fromkeys(
        (arm, f"EP{ep}", op, *_fact_columns(m)) for arm, ep, _, op, m, _ in _ops(cells)
    )
    return text_table(f"{load}: what travelled", _FACTS, list(rows))


def _fact_columns(metrics: OpMetrics) -> tuple[object, ...]:
    fact: Mapping[str, Any] = metrics.facts
    link, imbalance = fact.get("link_bytes_per_s"), fact.get("max_over_mean_received_rows")
    return (
        *[fact.get(f"wire_bytes_{end}") for end in ("out_max", "in_max", "total")],
        None if link is None else f"{link / 1e9:.3g}",
        None if imbalance is None else f"{imbalance:.3f}",
        {True: "yes", False: "NO", None: "not recorded"}[fact.get("checked")],
        *[fact.get(name) for name in ("dedup", "layout")],
        {True: "graph", False: "eager", None: ""}[fact.get("graph")],
        fact.get("timed_region"),
    )


def _us(time: float | None) -> str:
    return "" if time is None else f"{time:.1f}"
