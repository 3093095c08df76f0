"""Where an HTTP/1.1 message ends, for any split of its bytes (RFC 9112).

Pure: no sockets. Bodies are never copied or rebuilt, because the router forwards the bytes
that it received. A body's framing object is fed each read in order; `feed` says where the
message ends in that read. Heads, which say how a body is framed, are read in `heads.py`.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

MAX_HEAD_BYTES: Final = 65536
"""Longest head of a request or response, and longest trailer section."""

MAX_CHUNK_LINE_BYTES: Final = 4096
"""Longest chunk-size line, extensions included."""

MORE: Final = -1
"""What `feed` returns while the message has not ended."""

_SIZE_LINE = re.compile(rb"\r\n([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


class FramingError(ValueError):
    """Bytes that are not HTTP/1.1, or whose end cannot be known."""


NO_BODY: Final = 0
CHUNKED: Final = -1
UNTIL_CLOSE: Final = -2
"""What a head says about its body, where that is not a number of bytes."""


class Framing(Protocol):
    """Tracks one message body."""

    def feed(self, data: bytes, start: int = 0) -> int:
        """Offset in `data` just behind the message, or `MORE`; raises `FramingError`.

        `start`, on the first read only, is where the body begins: just behind its head.
        """


class Length:
    """A body of a known number of bytes. Zero bytes end before any feed."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    def feed(self, data: bytes, start: int = 0) -> int:
        """See `Framing.feed`."""
        left = self._left - len(data) + start
        if left > 0:
            self._left = left
            return MORE
        self._left = 0
        return len(data) + left


class UntilClose:
    """A response body that ends with its connection."""

    __slots__ = ()

    def feed(self, data: bytes, start: int = 0) -> int:
        """Always `MORE`: only the end of the connection ends the body."""
        return MORE


def framing(length: int) -> Framing:
    """Tracks a body of `length` bytes, or `CHUNKED`, or `UNTIL_CLOSE`."""
    if length == CHUNKED:
        return Chunked()
    return UntilClose() if length == UNTIL_CLOSE else Length(length)


# A chunk of 1 to 4,095 bytes without extensions, which is every chunk of a token stream:
# its size line with the line end before it -> distance to the line end that closes the chunk.
# One slice and one look-up a chunk also check that the previous chunk closed where it said.
_STRIDES: Final = {
    line: len(line) + size for size in range(1, 0x1000) for line in (b"\r\n%x\r\n" % size,)
}
_WIDTHS: Final = (6, 7, 5)  # of those size lines


class Chunked:
    """A chunked body, chunk extensions and trailers included.

    Every chunk is walked, so a payload that looks like the last chunk does not end the body.
    Behind the end it is as new, ready for the connection's next body.
    """

    __slots__ = ("_carry", "_skip", "_trailers", "_width")

    def __init__(self) -> None:
        self._width = 6  # of the last size line, "\r\nd4\r\n"
        self._renew()

    def _renew(self) -> None:
        self._carry = b"\r\n"  # unread tail; the first size line has no line end before it
        self._skip = 0  # bytes of chunk payload that are still to come
        self._trailers = False

    def feed(self, data: bytes, start: int = 0) -> int:
        """See `Framing.feed`."""
        pos, carried = self._skip, 0
        if start:
            pos = start - 2  # the head's last line end is the one before the first size line
        elif self._carry:
            carried = len(self._carry)
            data = self._carry + data
        if self._trailers:
            return self._walk(data, pos, carried)
        width, stride = self._width, _STRIDES.get
        while True:
            while step := stride(data[pos : pos + width]):
                pos += step
            left = len(data) - pos
            if left == 2 and data.endswith(b"\r\n"):  # where reads of a token stream end
                self._skip, self._carry = 0, b"\r\n"
                return MORE
            if left <= 0:
                self._skip, self._carry = -left, b""
                return MORE
            if data.startswith(b"\r\n0\r\n\r\n", pos):
                self._skip, self._carry = 0, b"\r\n"
                return pos + 7 - carried
            width = _width_at(data, pos)
            if not width:
                return self._walk(data, pos, carried)
            if width > 5:  # single digits, as of `data: [DONE]`, come once a stream
                self._width = width

    def _walk(self, data: bytes, pos: int, carried: int) -> int:
        """The chunks that the fast path does not know, from `pos`; the tail is carried over."""
        while not self._trailers and pos < len(data):
            line = _SIZE_LINE.match(data, pos)
            if line is None:
                return self._keep(data, pos, MAX_CHUNK_LINE_BYTES)
            size = int(line[1], 16)
            if size == 0:
                self._trailers, pos = True, line.end() - 2
                break
            pos = line.end() + size
        if not self._trailers:
            self._skip, self._carry = pos - len(data), b""
            return MORE
        end = data.find(b"\r\n\r\n", pos)
        if end < 0:
            return self._keep(data, pos, MAX_HEAD_BYTES)
        self._renew()
        return end + 4 - carried

    def _keep(self, data: bytes, pos: int, limit: int) -> int:
        """Carries an incomplete line over, unless more bytes cannot make it valid."""
        tail = data[pos:]
        complete = not self._trailers and tail.find(b"\n", 2) >= 0
        if len(tail) > limit or complete or not b"\r\n".startswith(tail[:2]):
            raise FramingError(f"bad chunk framing: {tail[:40]!r}")
        self._skip, self._carry = 0, tail
        return MORE


def _width_at(data: bytes, pos: int) -> int:
    """Width of the size line at `pos`; 0 where no plain one stands there."""
    for width in _WIDTHS:
        if data[pos : pos + width] in _STRIDES:
            return width
    return 0
