"""A report as text: styled on a terminal, plain elsewhere, within the width where it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console
from rich.text import Text

from sweeps.layout import GAP, folded, group_of, heading_lines, natural_width, spans, split
from sweeps.tablefmt import Block, Cell, Section, Table, Verbatim, numeric

MARK = " *"
_PAGE = 120  # width where there is no terminal to ask
_PARAGRAPH = 100
_NARROWEST_TEXT = 30


def print_report(title: str, sections: Sequence[Section], file: IO[str]) -> None:
    """Print to `file`."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    limit = max(console.width, 80) if console.is_terminal else _PAGE
    lines = [Text(title, style="bold")]
    for section in sections:
        lines += _section(section, limit)
    with console.capture() as capture:
        for line in lines:
            line.rstrip()
            console.print(line, soft_wrap=True)
    file.write(capture.get())  # at once: a reader that has seen enough is `BrokenPipeError` here


def _section(section: Section, limit: int) -> list[Text]:
    lines = [Text()]
    if section.title:
        head = f"── {section.title} "
        lines.append(Text(head.ljust(_PARAGRAPH, "─"), style="bold"))
    for index, block in enumerate(section.blocks):
        if index:
            lines.append(Text())
        lines += _block(block, limit)
    return lines


def _block(block: Block, limit: int) -> list[Text]:
    if isinstance(block, str):
        return [Text(line) for line in folded(block, min(limit, _PARAGRAPH))]
    if isinstance(block, Verbatim):
        body = [Text(f"    {line}") for line in block.text.splitlines()]
        return [Text(block.title, style="bold"), *body]
    lines: list[Text] = []
    for part in split(block, limit):
        lines += [Text()] if lines else []
        lines += [Text(part.title, style="bold")] if part.title else []
        lines += _table(part, limit)
    return lines


@dataclass
class _Column:
    cells: list[tuple[str, bool]]  # text as shown, bold
    heading: list[str]
    right: bool
    width: int
    gap: int  # blanks before it

    def aligned(self, text: str) -> str:
        return text.rjust(self.width) if self.right else text.ljust(self.width)


def _table(table: Table, limit: int) -> list[Text]:
    columns = [_column(table, index) for index in range(len(table.columns))]
    runs = spans(table.columns)
    for group, run in runs:
        missing = len(group) - _span_width(columns, run)
        columns[run[-1]].width += max(0, missing)
    _shrink(columns, limit)
    total = _span_width(columns, range(len(columns))) + columns[0].gap
    lines = _group_lines(columns, runs)
    deepest = max(len(column.heading) for column in columns)
    for depth in range(deepest):
        words = [([""] * (deepest - len(c.heading)) + c.heading)[depth] for c in columns]
        lines.append(_line([(c, word, False) for c, word in zip(columns, words, strict=True)]))
    lines.append(Text("─" * total))
    for number in range(len(table.rows)):
        lines += _row(columns, number)
    return lines


def _column(table: Table, index: int) -> _Column:
    cells = [row[index] for row in table.rows]
    right = numeric(table, index)
    shown = _without_repeats(cells) if index == 0 else _with_marks(cells)
    width = max(natural_width(table, index), *[len(text) if right else 0 for text, _ in shown], 0)
    before, here = (group_of(table.columns[i]) for i in (max(index - 1, 0), index))
    gap = 0 if index == 0 else GAP + (here != before)
    return _Column(shown, heading_lines(table.columns[index]), right, width, gap)


def _without_repeats(cells: Sequence[Cell]) -> list[tuple[str, bool]]:
    """Labels, blank where they repeat the line above: the eye finds where a new one starts."""
    above = [None, *[cell.text for cell in cells]]
    return [("" if c.text == a else c.text, c.better) for c, a in zip(cells, above, strict=False)]


def _with_marks(cells: Sequence[Cell]) -> list[tuple[str, bool]]:
    """Texts with marks; the others are padded, so that numbers stay below one another."""
    pad = " " * len(MARK) if any(cell.better for cell in cells) else ""
    return [(c.text + (MARK if c.better else pad if c.text else ""), c.better) for c in cells]


def _shrink(columns: list[_Column], limit: int) -> None:
    """Narrows columns of text, widest first, until the table fits or nothing can give."""
    texts = sorted((c for c in columns if not c.right), key=lambda c: -c.width)
    for column in texts:
        excess = _span_width(columns, range(len(columns))) - limit
        if excess > 0 and column.width > _NARROWEST_TEXT:
            column.width = max(_NARROWEST_TEXT, column.width - excess)


def _span_width(columns: Sequence[_Column], run: Sequence[int]) -> int:
    return sum(columns[i].width + columns[i].gap for i in run) - columns[run[0]].gap


def _group_lines(columns: Sequence[_Column], runs: Sequence[tuple[str, list[int]]]) -> list[Text]:
    """Headings over several columns, and a rule under each; nothing without groups."""
    if not any(group for group, _ in runs):
        return []
    names, rules = "", ""
    for group, run in runs:
        width, gap = _span_width(columns, run), " " * columns[run[0]].gap
        names += gap + group.center(width)
        rules += gap + ("─" if group else " ") * width
    return [Text(names), Text(rules)]


def _row(columns: Sequence[_Column], number: int) -> list[Text]:
    cells = [column.cells[number] for column in columns]
    texts = [
        [text] if column.right else folded(text, column.width)
        for column, (text, _) in zip(columns, cells, strict=True)
    ]
    height = max(len(lines) for lines in texts)
    padded = [lines + [""] * (height - len(lines)) for lines in texts]
    bold = [is_bold for _, is_bold in cells]
    return [
        _line(list(zip(columns, [lines[depth] for lines in padded], bold, strict=True)))
        for depth in range(height)
    ]


def _line(parts: Sequence[tuple[_Column, str, bool]]) -> Text:
    line = Text()
    for column, text, bold in parts:
        line.append(" " * column.gap)
        line.append(column.aligned(text), style="bold" if bold else "")
    return line
