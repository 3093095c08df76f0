"""Incremental framing of one HTTP/1.1 response (RFC 9112), for any split of its bytes.

The parser only finds where the body is: it keeps body bytes as they came and looks at no
content. A body's bytes are handed over as soon as they arrive, also from a chunk that is
still incomplete, so that the receive stamp of an event inside it stays true.
"""

from __future__ import annotations

import re
from functools import lru_cache

_MAX_HEAD_BYTES = 65_536
_MAX_LINE_BYTES = 8_192
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_CHUNK_SIZE = re.compile(rb"\r\n([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)

_HEAD, _LENGTH, _CHUNKS, _TRAILERS, _UNTIL_CLOSE, _DONE = range(6)


class HttpError(ValueError):
    """The peer's bytes are not an HTTP/1.1 response that this client can read."""


@lru_cache(maxsize=4096)
def _chunk_size(line: bytes) -> int:
    """Size in bytes from a line end and a chunk-size line. Cached: streams repeat few sizes."""
    match = _CHUNK_SIZE.fullmatch(line)
    if match is None:
        raise HttpError(f"malformed chunk size {line[:40]!r}: expected CRLF and hexadecimal digits")
    return int(match[1], 16)


class ResponseParser:
    """Parser of one response.

    Attributes:
        status: Status code; 0 until the final head came (1xx interim heads are skipped).
        headers: Names in lower case; repeated fields joined with commas.
        body: Pieces of the body in order.
        body_bytes: Length of all pieces together.
        keep_alive: Whether the connection may carry another request after this response.
        excess: Whether bytes came after the end of the response.
    """

    __slots__ = (
        "_left",
        "_state",
        "_tail",
        "body",
        "body_bytes",
        "excess",
        "headers",
        "keep_alive",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.keep_alive = False
        self.excess = False
        self._state = _HEAD
        self._tail = b""  # an incomplete line, kept until its end arrives
        self._left = 0  # bytes still to come of the current chunk or length

    def feed(self, data: bytes) -> bool:
        """Takes what one read gave. True once the response has ended.

        Raises:
            HttpError: The bytes break the framing.
        """
        if self._tail:
            data = self._tail + data
            self._tail = b""
        pos = self._feed_head(data) if self._state == _HEAD else 0
        if self._state == _CHUNKS:
            pos = self._feed_chunks(data, pos)
            if self._state == _CHUNKS:
                return False
        elif self._state == _LENGTH:
            pos = self._take(data, pos)
            if not self._left:
                self._state = _DONE
        elif self._state == _UNTIL_CLOSE:
            self._left = len(data) - pos
            pos = self._take(data, pos)
        if self._state == _TRAILERS:
            pos = self._feed_trailers(data, pos)
        if self._state != _DONE:
            return False
        self.excess = self.excess or pos < len(data)
        return True

    def feed_eof(self) -> bool:
        """Takes the end of the connection. True if that ends the response properly."""
        if self._state == _UNTIL_CLOSE:
            self._state = _DONE
        return self._state == _DONE

    def _take(self, data: bytes, pos: int) -> int:
        """Takes body bytes, at most `_left`; gives the position after them."""
        piece = data[pos : pos + self._left]
        if piece:
            self.body.append(piece)
            self.body_bytes += len(piece)
            self._left -= len(piece)
        return pos + len(piece)

    def _keep(self, data: bytes, pos: int, limit: int, what: str) -> int:
        """Keeps an incomplete line for the next read; gives the position after it."""
        self._tail = data[pos:]
        if len(self._tail) > limit:
            raise HttpError(f"{what} longer than {limit} bytes")
        return len(data)

    def _feed_chunks(self, data: bytes, pos: int) -> int:
        """Takes chunks; each begins with the CRLF that ends the head or the chunk before."""
        if self._left:
            pos = self._take(data, pos)
            if self._left:
                return pos
        # The hot path: a few operations per chunk, and no state written while chunks are whole.
        end, find, append = len(data), data.find, self.body.append
        while (eol := find(b"\r\n", pos + 2)) >= 0:
            size = _chunk_size(data[pos:eol])
            start = eol + 2
            if not size:
                self._state = _TRAILERS
                return start
            pos = start + size
            if pos > end:
                self._left = size
                return self._take(data, start)
            append(data[start:pos])
            self.body_bytes += size
        return self._keep(data, pos, _MAX_LINE_BYTES, "chunk-size line")

    def _feed_trailers(self, data: bytes, pos: int) -> int:
        # Trailer fields are framing to us: read up to the empty line and dropped.
        while (eol := data.find(b"\r\n", pos)) >= 0:
            if eol == pos:
                self._state = _DONE
                return eol + 2
            pos = eol + 2
        return self._keep(data, pos, _MAX_LINE_BYTES, "trailer line")

    def _feed_head(self, data: bytes) -> int:
        pos = 0
        while self._state == _HEAD:
            end = data.find(b"\r\n\r\n", pos)
            if end < 0:
                return self._keep(data, pos, _MAX_HEAD_BYTES, "response head")
            self._read_head(data[pos:end])
            pos = end + 4
        # The head's last CRLF is left to the chunks: see `_feed_chunks`.
        return pos - 2 if self._state == _CHUNKS else pos

    def _read_head(self, head: bytes) -> None:
        status_line, *lines = head.split(b"\r\n")
        match = _STATUS_LINE.fullmatch(status_line)
        if match is None:
            raise HttpError(f"not an HTTP/1.1 status line: {status_line[:80]!r}")
        status = int(match[2])
        if 100 <= status < 200 and status != 101:
            return  # interim: the final response follows
        self.status = status
        self.headers = _read_fields(lines)
        tokens = self.headers.get("connection", "").lower().replace(" ", "").split(",")
        http_1_1 = match[1] == b"1"
        self.keep_alive = "close" not in tokens and (http_1_1 or "keep-alive" in tokens)
        self._choose_framing()

    def _choose_framing(self) -> None:
        coding = self.headers.get("transfer-encoding")
        lengths = set(self.headers.get("content-length", "").replace(" ", "").split(","))
        if self.status in (204, 304):
            self._state = _DONE
        elif coding is not None:
            if coding.lower() != "chunked":
                raise HttpError(f"transfer-encoding {coding!r}: only `chunked` can be read")
            # Both fields together are an error that a proxy may have been fooled by.
            self.keep_alive = self.keep_alive and lengths == {""}
            self._state = _CHUNKS
        elif lengths != {""}:
            self._left = _content_length(lengths)
            self._state = _LENGTH
        else:
            self.keep_alive = False
            self._state = _UNTIL_CLOSE


def _content_length(lengths: set[str]) -> int:
    text = lengths.pop()
    if lengths or not (text.isascii() and text.isdigit()):
        raise HttpError(f"malformed content-length {', '.join([text, *lengths])!r}")
    return int(text)


def _read_fields(lines: list[bytes]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in lines:
        raw_name, colon, raw_value = line.partition(b":")
        if not colon or not raw_name or raw_name != raw_name.strip():
            raise HttpError(f"malformed header line {line[:80]!r}")
        name = raw_name.decode("latin-1").lower()
        value = raw_value.strip(b" \t").decode("latin-1")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields
