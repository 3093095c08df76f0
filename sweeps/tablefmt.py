"""A report is sections of paragraphs, tables and verbatim texts; renderers decide how they look.

A cell says whether its value is the better one of its row. Nothing is ever truncated here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENDED_BADLY = ("crash", "failed", "timeout")
_NUMBERS = re.compile(r"\d[\d.,/()e+≠ -]*")  # 8/8, 61.0-85.5, 0.81 (0.79-0.84) ≠ 1


@dataclass(frozen=True)
class Cell:
    """Text of one cell, and whether it holds the better value of its row."""

    text: str
    better: bool = False


@dataclass(frozen=True)
class Table:
    """A titled table; every row has as many cells as there are columns.

    A heading `group\\nname` stands under a heading that it shares with its neighbours. Between
    groups a table too wide for its page may be cut.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table '{self.title}' has {len(self.columns)} columns, a row has {len(row)}"
                )


@dataclass(frozen=True)
class Verbatim:
    """A titled text shown as it is: an error, a log."""

    title: str
    text: str


Block = Table | Verbatim | str


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs (`str`), tables and verbatim texts under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Value:
    """A metric's text and the number behind it; `number` is None where it cannot be compared."""

    text: str
    number: float | None = None
    beside: str = ""


@dataclass(frozen=True)
class Metric:
    """A column that every arm has. `lower_is_better` is None where neither end is better."""

    key: str
    heading: str
    lower_is_better: bool | None = None


Values = Mapping[tuple[str, str], Value]  # by (arm, metric key)


def text_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table without marks; None becomes a blank cell."""
    cells = tuple(tuple(Cell("" if v is None else str(v)) for v in row) for row in rows)
    return Table(title, tuple(columns), cells)


def better(numbers: Sequence[float | None], lower_is_better: bool | None) -> list[bool]:
    """Which numbers are the best of a row: none when fewer than two differ."""
    known = [n for n in numbers if n is not None]
    if lower_is_better is None or len(set(known)) < 2:
        return [False] * len(numbers)
    best = min(known) if lower_is_better else max(known)
    return [n == best for n in numbers]


def stacked(
    title: str,
    headings: tuple[str, str],
    arms: Sequence[str],
    metrics: Sequence[Metric],
    rows: Sequence[tuple[str, Values]],
) -> Table:
    """Metrics as columns; a line for each label and each arm that has values there.

    `headings` are those of the label and of the arm. The better value of a label is marked.
    """
    body = []
    for label, values in rows:
        marked = _marked(values, arms, metrics)
        present = [arm for arm in arms if any((arm, m.key) in values for m in metrics)]
        for arm in present:
            body.append((Cell(label), Cell(arm), *[marked[arm, m.key] for m in metrics]))
    return Table(title, (*headings, *[m.heading for m in metrics]), tuple(body))


def side_by_side(
    title: str,
    label_heading: str,
    arms: Mapping[str, str],
    metrics: Sequence[Metric],
    rows: Sequence[tuple[str, Values]],
    beside: str = "",
) -> Table:
    """A line for each label; a group of columns for each metric, in it one column for each arm.

    `arms` maps each arm to the heading of its columns. With `beside`, a column of that name
    with `Value.beside` follows each of them. The better value of a metric is marked.
    """
    headings = [
        f"{metric.heading}\n{name}"
        for metric in metrics
        for arm_heading in arms.values()
        for name in ([arm_heading, beside] if beside else [arm_heading])
    ]
    body = []
    for label, values in rows:
        marked = _marked(values, list(arms), metrics)
        cells = [Cell(label)]
        for metric in metrics:
            for arm in arms:
                cells.append(marked[arm, metric.key])
                if beside:
                    cells.append(Cell(values.get((arm, metric.key), Value("")).beside))
        body.append(tuple(cells))
    return Table(title, (label_heading, *headings), tuple(body))


def _marked(
    values: Values, arms: Sequence[str], metrics: Sequence[Metric]
) -> dict[tuple[str, str], Cell]:
    cells: dict[tuple[str, str], Cell] = {}
    for metric in metrics:
        row = [values.get((arm, metric.key), Value("")) for arm in arms]
        marks = better([value.number for value in row], metric.lower_is_better)
        for arm, value, mark in zip(arms, row, marks, strict=True):
            cells[arm, metric.key] = Cell(value.text, mark)
    return cells


def is_number(text: str) -> bool:
    """Whether a cell aligns as numbers do: numbers, a blank, or how a trial ended."""
    return not text or text in ENDED_BADLY or _NUMBERS.fullmatch(text) is not None


def numeric(table: Table, column: int) -> bool:
    """Whether a column holds numbers."""
    return column > 0 and all(is_number(row[column].text) for row in table.rows)
