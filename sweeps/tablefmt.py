"""A report is sections of paragraphs and tables, rendered to a terminal or to Markdown.

A cell says whether its value is the better one of its row; the renderers decide how that
looks (bold and a marker on a terminal, bold in Markdown). Nothing is ever truncated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

MARK = "*"
_WIDEST_COLUMN = 72  # long texts fold here; numbers never come near
_HEADING_WIDTH = 11
_ROOMY = 100_000


@dataclass(frozen=True)
class Cell:
    """Text of one cell, and whether it holds the better value of its row."""

    text: str
    better: bool = False


@dataclass(frozen=True)
class Table:
    """A titled table. Headings may hold line breaks; every row has as many cells as headings."""

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
class Section:
    """A heading with paragraphs (`str`) and tables under it."""

    title: str
    blocks: tuple[Table | str, ...]


@dataclass(frozen=True)
class Value:
    """A metric's text and the number behind it; `number` is None where it cannot be compared."""

    text: str
    number: float | None = None


@dataclass(frozen=True)
class Metric:
    """A column that every arm has. `lower_is_better` is None where neither end is better."""

    key: str
    heading: str
    lower_is_better: bool | None = None


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


def side_by_side(
    title: str,
    row_heading: str,
    arms: Sequence[str],
    metrics: Sequence[Metric],
    rows: Sequence[tuple[str, dict[tuple[str, str], Value]]],
    *,
    metrics_outside: bool = False,
) -> Table:
    """Arms side by side, the better value of each metric marked in every row.

    `rows` pairs a row's label with its values by (arm, metric key); an absent one is blank.
    Columns go arm by arm, or metric by metric with `metrics_outside`.
    """
    columns = [(arm, metric) for arm in arms for metric in metrics]
    if metrics_outside:
        columns = [(arm, metric) for metric in metrics for arm in arms]
    headings = [f"{arm}\n{metric.heading}".strip() for arm, metric in columns]
    body = []
    for label, values in rows:
        marked = _marked(values, arms, metrics)
        body.append((Cell(label), *[marked[arm, metric.key] for arm, metric in columns]))
    return Table(title, (row_heading, *headings), tuple(body))


def _marked(
    values: dict[tuple[str, str], Value], arms: Sequence[str], metrics: Sequence[Metric]
) -> dict[tuple[str, str], Cell]:
    cells: dict[tuple[str, str], Cell] = {}
    for metric in metrics:
        row = [values.get((arm, metric.key), Value("")) for arm in arms]
        marks = better([value.number for value in row], metric.lower_is_better)
        for arm, value, mark in zip(arms, row, marks, strict=True):
            cells[arm, metric.key] = Cell(value.text, mark)
    return cells


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The whole report as Markdown (GitHub's tables)."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        for block in section.blocks:
            parts.append(_escape(block) if isinstance(block, str) else _markdown_table(block))
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    lines = [f"### {_escape(table.title)}", ""] if table.title else []
    lines.append("| " + " | ".join(_one_line(c) for c in table.columns) + " |")
    lines.append("|" + " --- |" * len(table.columns))
    for row in table.rows:
        lines.append("| " + " | ".join(_markdown_cell(cell) for cell in row) + " |")
    return "\n".join(lines)


def _markdown_cell(cell: Cell) -> str:
    text = _one_line(cell.text)
    return f"**{text}**" if cell.better else text


def _one_line(text: str) -> str:
    return "<br>".join(_escape(line).replace("|", "\\|") for line in text.splitlines())


def _escape(text: str) -> str:
    for char in "\\*_`":
        text = text.replace(char, "\\" + char)
    return text.replace("&", "&amp;").replace("<", "&lt;")


def print_report(title: str, sections: Sequence[Section], file: IO[str]) -> None:
    """Print to `file`: styled on a terminal, plain text elsewhere."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    text_width = max(console.width, _WIDEST_COLUMN)
    with console.capture() as capture:
        console.print(Text(title, style="bold"))
        for section in sections:
            console.print(Text(f"\n{section.title}\n{'=' * len(section.title)}", style="bold"))
            for block in section.blocks:
                _print_block(console, block, text_width)
    file.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))


def _print_block(console: Console, block: Table | str, text_width: int) -> None:
    console.width = text_width
    if isinstance(block, str):
        console.print(Text("\n" + block))
        return
    console.print(Text("\n" + block.title, style="bold"), soft_wrap=True)
    table = _rich_table(block)
    # A table wider than the terminal is left to the terminal to wrap: cutting it loses numbers.
    roomy = console.options.update(width=_ROOMY)
    console.width = max(text_width, Measurement.get(console, roomy, table).maximum)
    console.print(table)


def _rich_table(table: Table) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    headings = [_folded_heading(heading) for heading in table.columns]
    deepest = max(len(lines) for lines in headings)
    for index, lines in enumerate(headings):
        right = index > 0 and all(_numeric(row[index].text) for row in table.rows)
        drawn.add_column(
            Text("\n".join([""] * (deepest - len(lines)) + lines)),
            justify="right" if right else "left",
            max_width=_WIDEST_COLUMN,
            overflow="fold",
        )
    for row in table.rows:
        drawn.add_row(*[_rich_cell(cell) for cell in row])
    return drawn


def _folded_heading(heading: str) -> list[str]:
    """Lines of a heading, broken after blanks and underscores: columns stay narrow."""
    lines: list[str] = []
    for given in heading.splitlines():
        lines.append("")
        for piece in re.findall(r"[^_ ]*[_ ]?", given):
            if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > _HEADING_WIDTH:
                lines.append("")
            lines[-1] += piece
    return [line.rstrip() for line in lines]


def _rich_cell(cell: Cell) -> Text:
    if cell.better:
        return Text(f"{cell.text} {MARK}", style="bold")
    return Text(cell.text)


def _numeric(text: str) -> bool:
    return not text or text[0].isdigit() or text in ("crash", "failed", "timeout")
