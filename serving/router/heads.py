"""Heads of HTTP/1.1 messages, read only as far as framing and routing need (RFC 9112). Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from serving.router.framing import CHUNKED, NO_BODY, UNTIL_CLOSE, FramingError

DEFAULT_ROLE: Final = "measured"

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb"+) ([\x21-\x7e\x80-\xff]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?", re.DOTALL)
_FIELD = re.compile(rb"(" + _TOKEN + rb"+):[ \t]*(.*?)[ \t]*", re.DOTALL)
_FIELDS = frozenset(
    (
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"expect",
        b"x-ep-ray-role",
        b"x-session-id",
    )
)
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,32}")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What the router needs of a request's head.

    Attributes:
        method: As sent.
        target: Path and query.
        length: Bytes of the body, or `CHUNKED`.
        role: Value of `x-ep-ray-role`.
        session: Value of `x-session-id`; None without one.
        expects: Whether the client waits for `100 Continue` before it sends the body.
        keep_alive: Whether the client takes another response on this connection.
        counted: Whether it is a `POST /v1/...`, which takes a turn and is counted.
    """

    method: bytes
    target: bytes
    length: int
    role: str
    session: bytes | None
    expects: bool
    keep_alive: bool
    counted: bool


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What the router needs of a response's head.

    Attributes:
        forward: The head as the client gets it, with the endpoint's header line.
        status: Status code; below 200 it is interim and another head follows.
        length: Bytes of the body, or `CHUNKED`, or `UNTIL_CLOSE`.
        keep_alive: Whether the connection stays usable behind the body.
    """

    forward: bytes
    status: int
    length: int
    keep_alive: bool


def request_head(data: bytes, end: int) -> RequestHead:
    """Reads the request head that ends at `end`, its empty line included.

    Heads of a cell's requests differ by their request id alone, so all but it is remembered.

    Raises:
        FramingError: It is none, or leaves open where the message ends.
    """
    at = data.find(b"\r\nx-request-id:", 0, end)
    if at < 0:
        return parse_request(data[:end])
    return parse_request(data[:at] + data[data.find(b"\r\n", at + 2) : end])


@lru_cache(maxsize=1024)
def parse_request(head: bytes) -> RequestHead:
    """Reads a request head, its empty line included. Raises `FramingError`."""
    lines = head[:-4].split(b"\r\n")
    method, target, minor = _request_line(lines[0])
    fields = _fields(lines)
    return RequestHead(
        method,
        target,
        _request_length(fields),
        _role(fields[b"x-ep-ray-role"]) if b"x-ep-ray-role" in fields else DEFAULT_ROLE,
        fields.get(b"x-session-id"),
        b"expect" in fields and fields[b"expect"].lower() == b"100-continue",
        _keep_alive(minor, fields),
        method == b"POST" and target.startswith(b"/v1/"),
    )


def _request_length(fields: dict[bytes, bytes]) -> int:
    if b"transfer-encoding" not in fields:
        return _length(fields) or NO_BODY
    if b"content-length" in fields or _last_token(fields[b"transfer-encoding"]) != b"chunked":
        raise FramingError("the request's length is ambiguous: send one of the two framings")
    return CHUNKED


@lru_cache(maxsize=256)  # the heads of a cell's responses differ by their date, if at all
def parse_response(
    head: bytes, to_head_request: bool = False, extra_line: bytes = b""
) -> ResponseHead:
    """Reads a response head, its empty line included. Raises `FramingError`.

    Args:
        head: All bytes from the status line to the empty line.
        to_head_request: Whether the request was a HEAD, whose response has no body.
        extra_line: A header line for the client, inserted behind the status line.
    """
    lines = head[:-4].split(b"\r\n")
    minor, status = _status_line(lines[0])
    fields = _fields(lines)
    first = len(lines[0]) + 2
    forward = b"".join((head[:first], extra_line, head[first:]))
    keep_alive = _keep_alive(minor, fields)
    if to_head_request or status < 200 or status in (204, 304):
        return ResponseHead(forward, status, NO_BODY, keep_alive)
    if b"transfer-encoding" in fields:
        if _last_token(fields[b"transfer-encoding"]) != b"chunked":
            return ResponseHead(forward, status, UNTIL_CLOSE, False)
        keep_alive = keep_alive and b"content-length" not in fields
        return ResponseHead(forward, status, CHUNKED, keep_alive)
    length = _length(fields)
    if length is None:
        return ResponseHead(forward, status, UNTIL_CLOSE, False)
    return ResponseHead(forward, status, length, keep_alive)


# Most lines of a head repeat from one message to the next: remembering them makes strict
# checks of every line cheaper than a lenient search would be.


@lru_cache(maxsize=1024)
def _request_line(line: bytes) -> tuple[bytes, bytes, bytes]:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise FramingError(f"not an HTTP/1.1 request line: {line[:60]!r}")
    return match[1], match[2], match[3]


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
    if not text.isdigit() or len(text) > 18:
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
