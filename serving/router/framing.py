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


class Framing(Protocol):
    """Tracks one message body."""

    def feed(self, data: bytes) -> int:
        """Offset in `data` just behind the message, or `MORE`; raises `FramingError`."""


class Length:
    """A body of a known number of bytes. Zero bytes end before any feed: use `None` instead."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    def feed(self, data: bytes) -> int:
        """See `Framing.feed`."""
        left = self._left - len(data)
        if left > 0:
            self._left = left
            return MORE
        self._left = 0
        return len(data) + left


class UntilClose:
    """A response body that ends with its connection."""

    __slots__ = ()

    def feed(self, data: bytes) -> int:
        """Always `MORE`: only the end of the connection ends the body."""
        return MORE


# A chunk of 16 to 4,095 bytes without extensions, which is every chunk of a token stream:
# its size line with the line end before it -> distance to the line end that closes the chunk.
# One slice and one look-up a chunk also check that the previous chunk closed where it said.
_STRIDES: Final = {
    line: len(line) + size for size in range(0x10, 0x1000) for line in (b"\r\n%x\r\n" % size,)
}


class Chunked:
    """A chunked body, chunk extensions and trailers included.

    Every chunk is walked, so a payload that looks like the last chunk does not end the body.
    """

    __slots__ = ("_carry", "_skip", "_trailers", "_width")

    def __init__(self) -> None:
        self._carry = b"\r\n"  # unread tail; the first size line has no line end before it
        self._skip = 0  # bytes of chunk payload that are still to come
        self._trailers = False
        self._width = 6  # of the last size line, "\r\nd4\r\n"

    def feed(self, data: bytes) -> int:
        """See `Framing.feed`."""
        pos = self._skip
        carried = len(self._carry)
        if carried:
            data = self._carry + data
        if not self._trailers:
            width, stride = self._width, _STRIDES.get
            while step := stride(data[pos : pos + width]):
                pos += step
            left = len(data) - pos
            if left <= 0:
                self._skip, self._carry = -left, b""
                return MORE
            if left == 2 and data.endswith(b"\r\n"):  # where reads of a token stream end
                self._skip, self._carry = 0, b"\r\n"
                return MORE
            if data.startswith(b"\r\n0\r\n\r\n", pos):
                return pos + 7 - carried
        return self._walk(data, pos, carried)

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
            if line.end() - pos in (6, 7):
                self._width = line.end() - pos
            pos = line.end() + size
        if not self._trailers:
            self._skip, self._carry = pos - len(data), b""
            return MORE
        end = data.find(b"\r\n\r\n", pos)
        if end < 0:
            return self._keep(data, pos, MAX_HEAD_BYTES)
        self._carry = b""
        return end + 4 - carried

    def _keep(self, data: bytes, pos: int, limit: int) -> int:
        """Carries an incomplete line over, unless more bytes cannot make it valid."""
        tail = data[pos:]
        complete = not self._trailers and tail.find(b"\n", 2) >= 0
        if len(tail) > limit or complete or not b"\r\n".startswith(tail[:2]):
            raise FramingError(f"bad chunk framing: {tail[:40]!r}")
        self._skip, self._carry = 0, tail
        return MORE
