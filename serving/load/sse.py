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
_ONE_DATA_LINE = re.compile(rb"data: ?([^\r\n]*)")


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
    for blank in _BLANK_LINE.finditer(body, start):
        block = body[start : blank.start()]
        start = blank.end()
        if match := _ONE_DATA_LINE.fullmatch(block):
            yield Event(match[1], b"", start)
        elif (event := _read_block(block, start)) is not None:
            yield event


def _read_block(block: bytes, end: int) -> Event | None:
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
