"""Splits the body of a server-sent event stream (WHATWG HTML, section 9.2) into events.

It works on the whole body after the cell has ended, so that no split of the byte stream can
change an event; where an event ends in the body tells which read brought its last byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"
# A line end followed by an empty line. Atomic, so that the CR and LF of one CRLF are never
# taken for two line ends.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r){2}")
_LINE_END = re.compile(rb"\r\n|\n|\r")


class Event(NamedTuple):
    """One dispatched event.

    Attributes:
        data: Its `data` lines, joined with LF.
        name: Its `event` field; empty where there is none.
        end: Offset in the body just after the empty line that dispatched it.
    """

    data: bytes
    name: bytes
    end: int


def split_events(body: bytes) -> Iterator[Event]:
    """Events of a body in order. An event that no empty line ended is dropped, as the
    standard asks; comments and events without data are none."""
    start = len(_BOM) if body.startswith(_BOM) else 0
    for stop, end in _blank_lines(body, start):
        if event := _read_block(body[start:stop], end):
            yield event
        start = end


def _blank_lines(body: bytes, start: int) -> Iterator[tuple[int, int]]:
    """(end of the text before it, end) of each line end with the empty line that follows."""
    if b"\r" in body:
        yield from (blank.span() for blank in _BLANK_LINE.finditer(body, start))
        return
    # Nearly all servers end lines with LF, and then a plain search is ten times faster.
    while (stop := body.find(b"\n\n", start)) >= 0:
        start = stop + 2
        yield stop, start


def _read_block(block: bytes, end: int) -> Event | None:
    if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:
        return Event(block[6:], b"", end)
    data: list[bytes] = []
    name = b""
    for line in _LINE_END.split(block):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return Event(b"\n".join(data), name, end) if data else None
