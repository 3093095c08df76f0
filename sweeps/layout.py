"""How wide a table is, and how one that is too wide is cut between its groups of columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import groupby

from sweeps.tablefmt import Table

WIDEST_COLUMN = 72  # long texts fold here; numbers never come near
GAP = 2
_HEADING_WIDTH = 11


def group_of(heading: str) -> str:
    """What a heading shares with its neighbours; empty where it stands alone."""
    group, _, name = heading.partition("\n")
    return group if name else ""


def spans(columns: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Runs of neighbouring columns of one group, as their indices."""
    runs = groupby(range(len(columns)), key=lambda index: group_of(columns[index]))
    return [(group, list(run)) for group, run in runs]


def heading_lines(heading: str) -> list[str]:
    """Lines of a heading without its group, broken after blanks and underscores."""
    name = heading.partition("\n")[2] or heading
    lines: list[str] = []
    for given in name.splitlines() or [""]:
        lines.append("")
        for piece in re.findall(r"[^_ ]*[_ ]?", given):
            if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > _HEADING_WIDTH:
                lines.append("")
            lines[-1] += piece
    return [line.rstrip() for line in lines]


def folded(text: str, width: int) -> list[str]:
    """Lines of a text, none wider than `width`; its own line breaks stay."""
    return [
        line
        for given in text.splitlines() or [""]
        for line in textwrap.wrap(given, width, break_on_hyphens=False) or [""]
    ]


def natural_width(table: Table, column: int) -> int:
    """Width that a column takes when its long texts are folded."""
    widest = max(
        (len(line) for row in table.rows for line in row[column].text.splitlines()), default=0
    )
    heading = max(len(line) for line in heading_lines(table.columns[column]))
    return max(min(widest, WIDEST_COLUMN), heading)


def table_width(table: Table) -> int:
    """Width of a table with its gaps."""
    count = len(table.columns)
    return sum(natural_width(table, index) for index in range(count)) + GAP * (count - 1)


def split(table: Table, limit: int) -> list[Table]:
    """The table, or parts of it cut between groups so that each fits `limit` where it can.

    Every part repeats the leading columns, which have no group; the first has the title.
    """
    runs = spans(table.columns)
    labels = runs[0][1] if runs and not runs[0][0] else []
    groups = [run for _, run in runs if run != labels]
    if table_width(table) <= limit or len(groups) < 2:
        return [table]
    parts: list[list[list[int]]] = []
    for run in groups:
        if parts and table_width(_part(table, "", labels, [*parts[-1], run])) <= limit:
            parts[-1].append(run)
        else:
            parts.append([run])
    return [_part(table, "" if n else table.title, labels, part) for n, part in enumerate(parts)]


def _part(table: Table, title: str, labels: list[int], groups: Sequence[list[int]]) -> Table:
    chosen = [*labels, *[index for run in groups for index in run]]
    return Table(
        title,
        tuple(table.columns[index] for index in chosen),
        tuple(tuple(row[index] for index in chosen) for row in table.rows),
    )
