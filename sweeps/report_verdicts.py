"""Verdicts of a serving sweep in words: cell by cell, the first arm against each other one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sweeps.results import labels
from sweeps.stats import REPEATS_NEEDED
from sweeps.tablefmt import Section, Table, text_table
from sweeps.verdict import Kind, Verdict, verdicts
from sweeps.view import View


def sections(view: View) -> list[Section]:
    """A line for each cell and metric; nothing where no cell has two arms."""
    found = verdicts(view.serving, labels(view.of("serving")))
    if not found:
        return []
    pairs = groupby(found, key=lambda verdict: (verdict.first, verdict.other))
    tables = [_table(f"{first} against {other}", list(of)) for (first, other), of in pairs]
    return [Section("Serving verdicts", (_explain(found[0].first), *tables))]


def _explain(first: str) -> str:
    return (
        f"{first} against each other arm: the ends of the interval in the table of ratios, and "
        f"whether {first} is the better one. A verdict takes at least {REPEATS_NEEDED} paired "
        f"repeats, an interval that excludes 1, and a sign-flip test with p at most 0.05, since "
        "with few pairs the interval alone is too narrow. Fewer pairs cannot pass: "
        f"{REPEATS_NEEDED} that all agree have p = 2/2^{REPEATS_NEEDED} = "
        f"{2 / 2**REPEATS_NEEDED:.3f}, one less {2 / 2 ** (REPEATS_NEEDED - 1):.3f}."
    )


def _table(title: str, found: Sequence[Verdict]) -> Table:
    rows = [
        (f"{cell.shape} {cell.load}", *line)
        for cell, of in groupby(found, key=lambda verdict: verdict.cell)
        for line in _lines(list(of))
    ]
    return text_table(title, ("cell", "metric", "verdict"), rows)


def _lines(found: Sequence[Verdict]) -> list[tuple[str, str]]:
    """Metric and verdict; one line for metrics that share the reason for having none."""
    lines = []
    for _, of in groupby(found, key=lambda v: v.words if _few(v) else v.metric):
        group = list(of)
        names = ", ".join(verdict.metric.heading for verdict in group)
        lines.append((names if _few(group[0]) else names + _direction(group[0]), group[0].words))
    return lines


def _few(verdict: Verdict) -> bool:
    return verdict.kind in (Kind.none, Kind.too_few)


def _direction(verdict: Verdict) -> str:
    return f" ({'lower' if verdict.metric.lower_is_better else 'higher'} is better)"
