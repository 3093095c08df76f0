"""All-to-all tables of a sweep: headlines side by side, then everything known of each cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sweeps.a2a_metrics import OPS, A2aMetrics, OpMetrics
from sweeps.report_ratio import ratio_table
from sweeps.results import Outcome, labels
from sweeps.stats import median
from sweeps.tablefmt import Block, Metric, Section, Table, Value, side_by_side, text_table
from sweeps.view import View

HEADLINES = (
    Metric("dispatch_us", "dispatch µs", lower_is_better=True),
    Metric("combine_us", "combine µs", lower_is_better=True),
    Metric("pair_us", "pair µs", lower_is_better=True),
)
BESIDE = "x bound"
_TIMES = (
    *("arm", "EP", "op", "headline µs", "pooled µs\np50", "pooled µs\np95", "pooled µs\np99"),
    *("rank p50 µs", "cold µs", "floor µs", "iterations"),
)
_TRAFFIC = (
    *("arm", "EP", "op", "bytes on the wire\nout max", "bytes on the wire\nin max"),
    *("bytes on the wire\ntotal", "bound\nlink GB/s", "bound\nµs", f"bound\n{BESIDE}"),
    *("GB/s\nwire", "GB/s\nalgbw", "GB/s\nbusbw", "imbalance"),
)
_REGIONS = ("arm", "op", "timed region", "layout", "dedup", "mode", "checked", "headline")
_SENTENCE = (
    "Headline: the maximum over ranks of each iteration, then the median over iterations{more}; "
    "cells measured as another project does have its statistic. "
    f"`{BESIDE}`: headline over the lower bound. Marked: the lowest of a row."
)

Cells = Sequence[tuple[int, dict[str, Outcome[A2aMetrics]]]]


def sections(view: View) -> list[Section]:
    """The all-to-all tables, or nothing when the sweep measured none."""
    if not view.a2a:
        return []
    blocks: list[Block] = [_sentence(view)]
    for load, cells in _by_load(view):
        blocks += [_headlines(view, load, cells), _times(load, cells), _traffic(load, cells)]
    return [Section("All-to-all", (*blocks, _regions(view))), *_ratios(view)]


def brief(view: View) -> list[Section]:
    """Headlines only, and their ratios."""
    if not view.a2a:
        return []
    tables = [_headlines(view, load, cells) for load, cells in _by_load(view)]
    return [Section("All-to-all", (_sentence(view), *tables)), *_ratios(view)]


def _sentence(view: View) -> str:
    repeats = max(len(o.metrics) for arms in view.a2a.values() for o in arms.values())
    return _SENTENCE.format(more=", then the median over repeats" if repeats > 1 else "")


def _by_load(view: View) -> Iterator[tuple[str, Cells]]:
    """Cells of each load, the largest EP size first as published tables have it."""
    for load in dict.fromkeys(load for load, _ in view.a2a):
        cells = [(ep, outcomes) for (at, ep), outcomes in view.a2a.items() if at == load]
        yield load, sorted(cells, key=lambda cell: -cell[0])


def _ratios(view: View) -> list[Section]:
    arms = labels(view.of("a2a"))
    short = {key: _short(outcomes) for key, outcomes in sorted(view.a2a.items())}
    unique = len(set(short.values())) == len(short)
    rows = {short[k] if unique else f"{k[0]}, EP{k[1]}": view.a2a[k] for k in short}
    return ratio_table("All-to-all ratios", arms, HEADLINES, rows)


def _short(outcomes: dict[str, Outcome[A2aMetrics]]) -> str:
    """What usually tells two cells apart."""
    trial = next(iter(outcomes.values())).trials[0]
    return ", ".join([f"{trial.phase}, {trial.routing}, EP{trial.ep}", *trial.unusual])


def _headlines(view: View, load: str, cells: Cells) -> Table:
    there = {arm for _, outcomes in cells for arm in outcomes}
    arms = {arm: _heading(view, arm) for arm in labels(view.of("a2a")) if arm in there}
    metrics = _measured(cells)
    rows = [
        (f"EP{ep}", {(arm, m.key): _value(o, m) for arm, o in outcomes.items() for m in metrics})
        for ep, outcomes in cells
    ]
    bounded = any(value.beside for _, values in rows for value in values.values())
    return side_by_side(load, "", arms, metrics, rows, BESIDE if bounded else "")


def _measured(cells: Cells) -> list[Metric]:
    """Headlines of what any arm timed; all of them when none did, to say how each ended."""
    ran = [run for _, outcomes in cells for o in outcomes.values() for run in o.metrics.values()]
    ops = {f"{op}_us" for run in ran for op in run.ops}
    return [metric for metric in HEADLINES if metric.key in ops] or list(HEADLINES)


def _heading(view: View, arm: str) -> str:
    """Backend and transport: the asked one is in its label, else the one that was seen."""
    trials = [t for t in view.of("a2a") if t.label == arm and t.transport_seen]
    seen = sorted({t.transport_seen or "" for t in trials if t.transport_asked == "auto"})
    return f"{arm}\n{' or '.join(seen)} seen" if seen else arm.replace(" over ", "\nover ")


def _value(outcome: Outcome[A2aMetrics], metric: Metric) -> Value:
    if outcome.status:
        return Value(outcome.status)
    number = outcome.median(metric.key)
    op = metric.key.removesuffix("_us")
    ratios = [m.ops[op].ratio_to_bound for m in outcome.metrics.values() if op in m.ops]
    ratio = median([r for r in ratios if r is not None])
    return Value(_fixed(number), number, _fixed(ratio))


@dataclass(frozen=True)
class _Line:
    """One operation of one trial, with where it stands."""

    arm: str
    ep: int
    op: str
    metrics: OpMetrics
    floor_us: float | None

    @property
    def labels(self) -> tuple[str, str, str]:
        return self.arm, f"EP{self.ep}", self.op


def _lines(cells: Cells) -> list[_Line]:
    return [
        _Line(_repeated(arm, repeat, outcome), ep, op, run.ops[op], run.floor_us)
        for ep, outcomes in cells
        for arm, outcome in outcomes.items()
        for repeat, run in outcome.metrics.items()
        for op in OPS
        if op in run.ops
    ]


def _repeated(arm: str, repeat: int, outcome: Outcome[A2aMetrics]) -> str:
    return f"{arm}, repeat {repeat}" if len(outcome.trials) > 1 else arm


def _times(load: str, cells: Cells) -> Table:
    rows = [
        (
            *line.labels,
            *[_fixed(t) for t in (m.headline_us, m.p50_us, m.p95_us, m.p99_us)],
            f"{_fixed(m.rank_p50_min_us)}-{_fixed(m.rank_p50_max_us)}",
            *[_fixed(t) for t in (m.cold_us, line.floor_us)],
            m.iterations,
        )
        for line in _lines(cells)
        for m in [line.metrics]
    ]
    return text_table(f"{load}: times", _TIMES, rows)


def _traffic(load: str, cells: Cells) -> Table:
    rows = [(*line.labels, *_traffic_columns(line)) for line in _lines(cells)]
    return text_table(f"{load}: traffic and bound", _TRAFFIC, rows)


def _traffic_columns(line: _Line) -> tuple[object, ...]:
    m = line.metrics
    link, busbw = m.facts.get("link_bytes_per_s"), m.busbw_gb_per_s(line.ep)
    algbw = None if busbw is None or line.ep < 2 else busbw * line.ep / (line.ep - 1)
    imbalance = m.facts.get("max_over_mean_received_rows")
    return (
        *[m.facts.get(f"wire_bytes_{end}") for end in ("out_max", "in_max", "total")],
        _significant(None if link is None else link / 1e9),
        _fixed(m.bound_us),
        _fixed(m.ratio_to_bound),
        *[_significant(rate) for rate in (m.wire_gb_per_s, algbw, busbw)],
        "" if imbalance is None else f"{imbalance:.3f}",
    )


def _regions(view: View) -> Table:
    """What is inside the timed region, once for all cells that have it alike."""
    rows = dict.fromkeys(
        (arm, op, *_region_columns(run.ops[op]))
        for outcomes in view.a2a.values()
        for arm, outcome in outcomes.items()
        for run in outcome.metrics.values()
        for op in OPS
        if op in run.ops
    )
    return text_table("What was timed", _REGIONS, list(rows))


def _region_columns(metrics: OpMetrics) -> tuple[str, ...]:
    words = [metrics.facts.get(name) or "" for name in ("timed_region", "layout", "dedup")]
    mode = {True: "graph", False: "eager", None: ""}[metrics.facts.get("graph")]
    checked = {True: "yes", False: "NO", None: "not recorded"}[metrics.facts.get("checked")]
    return (*words, mode, checked, metrics.facts.get("statistic") or "")


def _fixed(number: float | None) -> str:
    return "" if number is None else f"{number:.1f}"


def _significant(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"
