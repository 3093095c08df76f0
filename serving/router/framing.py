"""Where an HTTP/1.1 message begins and ends, for any split of its bytes (RFC 9112).

Pure: no sockets. Heads are parsed only as far as framing and routing need, and bodies are
never copied or rebuilt, because the router forwards the bytes that it received. A body's
framing object is fed each read in order; `feed` says where the message ends in that read.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

MAX_HEAD_BYTES: Final = 65536
"""Longest head of a request or response, and longest trailer section."""

MAX_CHUNK_LINE_BYTES: Final = 4096
"""Longest chunk-size line, extensions included."""

MORE: Final = -1
"""What `feed` returns while the message has not ended."""

DEFAULT_ROLE: Final = "measured"

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb"+) ([\x21-\x7e\x80-\xff]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?", re.DOTALL)
_FIELD = re.compile(rb"(" + _TOKEN + rb"+):[ \t]*(.*?)[ \t]*", re.DOTALL)
_FIELDS = frozenset(
    (b"content-length", b"transfer-encoding", b"connection", b"expect", b"x-ep-ray-role")
)
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_LENGTH = re.compile(rb"[0-9]{1,18}")
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


class RequestHead(NamedTuple):
    """What the router needs of a request's head.

    Attributes:
        method: As sent.
        target: Path and query.
        body: How the body is framed; None without one.
        role: Value of `x-ep-ray-role`.
        expects: Whether the client waits for `100 Continue` before it sends the body.
        keep_alive: Whether the client takes another response on this connection.
    """

    method: bytes
    target: bytes
    body: Framing | None
    role: str
    expects: bool
    keep_alive: bool


class ResponseHead(NamedTuple):
    """What the router needs of a response's head.

    Attributes:
        status: Status code; below 200 it is interim and another head follows.
        body: How the body is framed; None without one.
        keep_alive: Whether the connection stays usable behind the body.
    """

    status: int
    body: Framing | None
    keep_alive: bool


def parse_request(head: bytes) -> RequestHead:
    """Reads a request head, its empty line included. Raises `FramingError`."""
    lines = head[:-4].split(b"\r\n")
    method, target, minor = _request_line(lines[0])
    fields = _fields(lines)
    if b"transfer-encoding" in fields:
        if b"content-length" in fields or _last_token(fields[b"transfer-encoding"]) != b"chunked":
            raise FramingError("the request's length is ambiguous: send one of the two framings")
        body: Framing | None = Chunked()
    else:
        length = _length(fields)
        body = Length(length) if length else None
    return RequestHead(
        method,
        target,
        body,
        _role(fields[b"x-ep-ray-role"]) if b"x-ep-ray-role" in fields else DEFAULT_ROLE,
        b"expect" in fields and fields[b"expect"].lower() == b"100-continue",
        _keep_alive(minor, fields),
    )


def parse_response(head: bytes, to_head_request: bool = False) -> ResponseHead:
    """Reads a response head, its empty line included. Raises `FramingError`.

    Args:
        head: All bytes from the status line to the empty line.
        to_head_request: Whether the request was a HEAD, whose response has no body.
    """
    lines = head[:-4].split(b"\r\n")
    minor, status = _status_line(lines[0])
    fields = _fields(lines)
    keep_alive = _keep_alive(minor, fields)
    if to_head_request or status < 200 or status in (204, 304):
        return ResponseHead(status, None, keep_alive)
    if b"transfer-encoding" in fields:
        if _last_token(fields[b"transfer-encoding"]) != b"chunked":
            return ResponseHead(status, UntilClose(), False)
        return ResponseHead(status, Chunked(), keep_alive and b"content-length" not in fields)
    length = _length(fields)
    if length is None:
        return ResponseHead(status, UntilClose(), False)
    return ResponseHead(status, Length(length) if length else None, keep_alive)


# Most lines of a head repeat from one message to the next: remembering them makes strict
# checks of every line cheaper than a lenient search would be.


@lru_cache(maxsize=1024)
def _request_line(line: bytes) -> tuple[bytes, bytes, bytes]:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise FramingError(f"not an HTTP/1.1 request line: {line[:60]!r}")
    return match[1], match[2], match[3]


@lru_cache(maxsize=1024)
def _status_line(line: bytes) -> tuple[bytes, int]:
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise FramingError(f"not an HTTP/1.1 response: it begins with {line[:60]!r}")
    return match[1], int(match[2])


@lru_cache(maxsize=1024)
def _field(line: bytes) -> tuple[bytes, bytes] | None:
    """Lower-case name and value of a header line; None when the router does not need it."""
    match = _FIELD.fullmatch(line)
    if match is None:
        raise FramingError(f"not an HTTP/1.1 header line: {line[:60]!r}")
    name = match[1].lower()
    return (name, match[2]) if name in _FIELDS else None


def _fields(lines: list[bytes]) -> dict[bytes, bytes]:
    """The fields that the router needs; repeated ones are joined as RFC 9110 5.3 does."""
    fields: dict[bytes, bytes] = {}
    for field in map(_field, lines[1:]):
        if field is not None:
            name, value = field
            fields[name] = fields[name] + b"," + value if name in fields else value
    return fields


def _length(fields: dict[bytes, bytes]) -> int | None:
    """The content length; several equal values are one. Raises `FramingError`."""
    text = fields.get(b"content-length")
    if text is None:
        return None
    if b"," in text:
        values = {value.strip() for value in text.split(b",")}
        text = values.pop() if len(values) == 1 else b"?"
    if not _LENGTH.fullmatch(text):
        raise FramingError(f"bad content-length: {fields[b'content-length'][:60]!r}")
    return int(text)


def _last_token(value: bytes) -> bytes:
    return value.rpartition(b",")[2].strip().lower()


def _keep_alive(minor: bytes, fields: dict[bytes, bytes]) -> bool:
    value = fields.get(b"connection")
    if value is None:
        return minor == b"1"
    tokens = {token.strip() for token in value.lower().split(b",")}
    return b"close" not in tokens if minor == b"1" else b"keep-alive" in tokens


@lru_cache(maxsize=64)
def _role(value: bytes) -> str:
    role = value.decode("latin-1")
    if not _ROLE.fullmatch(role):
        raise FramingError(f"bad x-ep-ray-role: {role[:60]!r}: 1 to 32 of A-Z a-z 0-9 _ . -")
    return role
