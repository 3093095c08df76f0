"""A report as Markdown with the tables of code hosts."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from sweeps.layout import split
from sweeps.tablefmt import Block, Cell, Section, Table, Verbatim, numeric

_PAGE = 130  # characters that a code host shows of a table without scrolling
_FENCE = "```"
_MOST_LINES = 12  # of a verbatim text that stays unfolded


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The whole report."""
    parts = [f"# {_escape(title)}"]
    for section in sections:
        parts += [f"## {_escape(section.title)}"] if section.title else []
        for block in section.blocks:
            parts += _block(block)
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> list[str]:
    if isinstance(block, str):
        return [_escape(block)]
    if isinstance(block, Verbatim):
        return _verbatim(block)
    parts: list[str] = []
    for table in split(block, _PAGE):
        parts += [f"### {_escape(table.title)}"] if table.title else []
        parts.append(_table(table))
    return parts


def _verbatim(block: Verbatim) -> list[str]:
    """The text under its title; a long one is folded away until it is asked for."""
    if len(block.text.splitlines()) <= _MOST_LINES:
        return [_escape(block.title), _fenced(block.text)]
    summary = html.escape(block.title, quote=False)
    return [f"<details><summary>{summary}</summary>", _fenced(block.text), "</details>"]


def _fenced(text: str) -> str:
    fence = _FENCE
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def _table(table: Table) -> str:
    rules = ["---:" if numeric(table, i) else "---" for i in range(len(table.columns))]
    lines = [_line([_one_line(column) for column in table.columns]), _line(rules)]
    lines += [_line([_cell(cell) for cell in row]) for row in table.rows]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(cell: Cell) -> str:
    text = _one_line(cell.text)
    return f"**{text}**" if cell.better else text


def _one_line(text: str) -> str:
    return "<br>".join(_escape(line).replace("|", "\\|") for line in text.splitlines())


def _escape(text: str) -> str:
    """Text as it reads; what stands between two backticks stays code."""
    pieces = re.split(r"(`[^`\n]+`)", text)
    return "".join(p if i % 2 else _escape_plain(p) for i, p in enumerate(pieces))


def _escape_plain(text: str) -> str:
    for char in "\\*_`~[]":
        text = text.replace(char, "\\" + char)
    return text.replace("&", "&amp;").replace("<", "&lt;")
