"""Benefits and trade-offs of a sweep's first arm, written from its verdicts and their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from sweeps.results import labels
from sweeps.tablefmt import Block, Section, Table, text_table
from sweeps.verdict import JUDGED, Kind, Verdict, is_better, ratio_span, verdicts
from sweeps.view import ServingKey, View

_DECIDED = {
    Kind.ahead: "benefit",
    Kind.behind: "trade-off",
    Kind.no_difference: "no difference shown",
}
_TENDENCIES = {Kind.ahead: "better", Kind.behind: "worse", Kind.no_difference: "neither"}


@dataclass(frozen=True)
class _Pair:
    """Verdicts of the first arm against one other, and the cells that both have."""

    first: str
    other: str
    verdicts: tuple[Verdict, ...]

    @property
    def cells(self) -> list[ServingKey]:
        return list(dict.fromkeys(verdict.cell for verdict in self.verdicts))

    def of(self, *kinds: Kind) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.kind in kinds]


def sections(view: View) -> list[Section]:
    """What the first arm gains and pays against each other one; nothing where no cell has two."""
    found = verdicts(view.serving, labels(view.of("serving")))
    pairs = [_Pair(*names, tuple(of)) for names, of in groupby(found, lambda v: (v.first, v.other))]
    tables: list[Table] = [table for pair in pairs for table in _tables(pair)]
    tendencies = any(verdict.kind is Kind.too_few for verdict in found)
    explained = f"{_EXPLAINED} {_NEITHER}" if tendencies else _EXPLAINED
    blocks: list[Block] = [explained, *tables]
    return [Section("Benefits and trade-offs", tuple(blocks))] if tables else []


_EXPLAINED = (
    "The first arm over the other one, in the cells that both have; in brackets the least and the "
    "greatest ratio of the cells counted."
)
_NEITHER = (
    "Tendencies are no verdicts and may be chance; `neither`: the ratio reads as 1.00, or the "
    "interval of the repeats holds 1."
)


def _tables(pair: _Pair) -> list[Table]:
    title = f"{pair.first} against {pair.other}"
    decided = pair.of(*_DECIDED)
    few = pair.of(Kind.too_few)
    tables = []
    if decided:
        rows = _rows(pair, decided, lambda verdict: verdict.kind, _DECIDED)
        tables.append(text_table(title, ("", "finding"), rows))
    if few:
        rows = _rows(pair, few, _tendency, _TENDENCIES)
        tables.append(text_table(f"{title}: {_runs(few)}, no verdicts", ("", "tendency"), rows))
    if none := _without(pair):
        tables.append(text_table(f"{title}: no verdict", ("cells", "reason"), none))
    return tables


def _runs(few: Sequence[Verdict]) -> str:
    repeats = {verdict.ratio.repeats for verdict in few if verdict.ratio}
    least, most = min(repeats), max(repeats)
    if most == 1:
        return "tendencies of a single run"
    return f"tendencies of {most if least == most else f'{least} to {most}'} paired repeats"


def _tendency(verdict: Verdict) -> Kind:
    assert verdict.ratio is not None, "a verdict on too few repeats has a ratio"
    undecided = verdict.ratio.repeats > 1 and not verdict.ratio.excludes_one
    if undecided or round(verdict.ratio.value, 2) == 1:  # what reads as 1.00 is not called better
        return Kind.no_difference
    return Kind.ahead if is_better(verdict.ratio.value, verdict.metric) else Kind.behind


def _rows(
    pair: _Pair,
    found: Sequence[Verdict],
    kind_of: Callable[[Verdict], Kind],
    names: dict[Kind, str],
) -> list[tuple[str, str]]:
    """A line for each kind and metric that occur; a kind that does not is said to be absent."""
    rows = []
    for kind, name in names.items():
        of_kind = [
            (metric.key, [v for v in found if v.metric == metric and kind_of(v) is kind])
            for metric in JUDGED
        ]
        present = [
            (name, _finding(pair, kind, group, [v for v in found if v.metric.key == key]))
            for key, group in of_kind
            if group
        ]
        rows += present or ([] if kind is Kind.no_difference else [(name, "none")])
    return rows


def _finding(pair: _Pair, kind: Kind, group: Sequence[Verdict], judged: Sequence[Verdict]) -> str:
    """`lower TTFT p50 in 5 of 6 cells (0.41 to 0.63 ×): at c ≤ 8`."""
    metric, ratios = group[0].metric, [v.ratio.value for v in group if v.ratio]
    words = metric.heading
    if kind is not Kind.no_difference:
        lower = (kind is Kind.ahead) == bool(metric.lower_is_better)
        words = f"{'lower' if lower else 'higher'} {words}"
    span = ratio_span(min(ratios), max(ratios), kind is not Kind.no_difference)
    least, greatest = span.split(" to ")
    span = least if least == greatest else span
    many = (
        f"all {len(judged)}" if len(group) == len(judged) > 1 else f"{len(group)} of {len(judged)}"
    )
    plural = "cell" if len(judged) == 1 else "cells"
    where = _where([v.cell for v in group], pair.cells)
    return f"{words} in {many} {plural} ({span} ×)" + (f": {where}" if where else "")


def _where(cells: Sequence[ServingKey], every: Sequence[ServingKey]) -> str:
    """Which cells: empty for all of them, `at c ≤ 8` where that says it, else their names."""
    if set(cells) == set(every):
        return ""
    if any(cell.rate_per_s is not None for cell in every):
        return _named(cells)
    levels = {cell.concurrency for cell in cells}
    least, most = min(levels), max(levels)
    for words, low, high in (
        *([(f"at c = {least}", least, most)] if least == most else []),
        (f"at c ≤ {most}", 0, most),
        (f"at c ≥ {least}", least, math.inf),
    ):
        if set(cells) == {cell for cell in every if low <= cell.concurrency <= high}:
            return words
    return _named(cells)


def _named(cells: Sequence[ServingKey]) -> str:
    """`1024/256 c1 c4; 4096/128 c1`."""
    shapes: dict[str, list[str]] = {}
    for cell in dict.fromkeys(cells):
        shapes.setdefault(cell.shape, []).append(cell.load)
    return "; ".join(f"{shape} {' '.join(loads)}" for shape, loads in shapes.items())


def _without(pair: _Pair) -> list[tuple[str, str]]:
    """Cells without a verdict and without a tendency, by the reason."""
    reasons: dict[str, list[ServingKey]] = {}
    for verdict in pair.of(Kind.none):
        reasons.setdefault(verdict.words.removeprefix("no verdict: "), []).append(verdict.cell)
    return [(_named(cells), reason) for reason, cells in reasons.items()]
