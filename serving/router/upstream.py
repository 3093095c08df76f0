"""The router's side towards a rank: one kept-alive connection, and the response on it."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from serving.router.framing import MAX_HEAD_BYTES, MORE, Framing, FramingError, UntilClose
from serving.router.heads import ResponseHead, parse_response

if TYPE_CHECKING:
    from serving.router.endpoint import Endpoint
    from serving.router.exchange import Exchange

IDLE_LIMIT_S: Final = 4.0
"""Idle connections are dropped at this age: servers close theirs at 5 s (uvicorn's default)."""

_INTERIM: Final = (b"HTTP/1.1 1", b"HTTP/1.0 1")  # how a 1xx head begins
_PROBE_AFTER_S: Final = 0.05  # a connection that idled longer is checked for an end of stream


class Upstream(asyncio.Protocol):
    """A connection to an endpoint, with at most one exchange on it.

    Response bytes go to the client as they arrive; only the head gets a line inserted. The
    framing is followed to know where the response ends, for reuse and for the counters.
    """

    __slots__ = (
        "_body",
        "_fd",
        "_head",
        "_idle_since_s",
        "_partial",
        "_paused",
        "_url",
        "_write",
        "endpoint",
        "exchange",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._url = endpoint.url
        self.exchange: Exchange | None = None
        self._write: Callable[[bytes], None]
        self._body: Framing | None = None  # None until the response's head is complete
        self._head: ResponseHead
        self._partial = b""
        self._paused = False
        self._idle_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._fd: int = transport.get_extra_info("socket").fileno()

    # One request after the other

    def attach(self, exchange: Exchange, write: Callable[[bytes], None]) -> None:
        """Begins an exchange; `write` takes the response's bytes to the client."""
        self.exchange = exchange
        self._write = write

    def park(self, now_s: float) -> None:
        """Keeps the connection for a later request, unless the endpoint has moved since."""
        if self._url != self.endpoint.url or self.transport.is_closing():
            self.discard()
            return
        self._detach()
        if self._paused:
            self.pause(False)
        self._idle_since_s = now_s
        self.endpoint.idle.append(self)

    def discard(self) -> None:
        """Closes the connection at once; the rank sees that nobody waits any more."""
        self._detach()
        self.transport.abort()

    def _detach(self) -> None:
        self.exchange = None
        self._body = None
        self._partial = b""

    def idle_too_long(self, now_s: float) -> bool:
        """Whether the server may be about to close this idle connection."""
        return now_s - self._idle_since_s >= IDLE_LIMIT_S

    def reusable(self, now_s: float) -> bool:
        """Whether an idle connection can take a request: young, and not closed by the server."""
        if self.transport.is_closing():
            return False
        idle_s = now_s - self._idle_since_s
        return idle_s < _PROBE_AFTER_S or (idle_s < IDLE_LIMIT_S and not _readable(self._fd))

    # Backpressure

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading, because the client does not take more or does again."""
        if paused != self._paused and not self.transport.is_closing():
            self._paused = paused
            if paused:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.exchange:
            self.exchange.client.pause(True)

    def resume_writing(self) -> None:
        if self.exchange:
            self.exchange.client.pause(False)

    # The response

    def data_received(self, data: bytes) -> None:
        body = self._body
        if body is None:
            self._head_received(data)
            return
        try:
            end = body.feed(data)
        except FramingError as error:
            self._fail(str(error))
            return
        if end < 0:
            self._write(data)
        else:
            self._finish(data, end)

    def _head_received(self, data: bytes) -> None:
        if self.exchange is None:  # an idle connection has nothing to say
            self._drop_idle()
            return
        try:
            if self._partial:
                data = self._partial + data
            if data.startswith(_INTERIM):
                data = self._skip_interim(data)
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._partial = data
                if len(data) > MAX_HEAD_BYTES:
                    raise FramingError(f"no end of head in {len(data)} bytes")
                return
            self._answer(data, end)
        except FramingError as error:
            self._fail(str(error))

    def _skip_interim(self, data: bytes) -> bytes:
        """Passes 1xx heads on (`100 Continue`) and returns what is behind them."""
        while data.startswith(_INTERIM):
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                break
            if parse_response(data[:end]).status == 101:
                raise FramingError("the router does not pass on protocol upgrades")
            self._write(data[:end])
            data = data[end:]
        return data

    def _answer(self, data: bytes, end: int) -> None:
        """Passes on the final head, which ends at `end`, with what came behind it."""
        assert self.exchange is not None
        head = self._head = parse_response(data[:end], self.exchange.head_request)
        self.exchange.answered = head
        stop = 0
        if head.body is not None:
            stop = head.body.feed(data[end:]) if len(data) > end else MORE
        line = data.index(b"\r\n") + 2
        header = self.endpoint.header
        data = b"".join((data[:line], header, data[line:]))
        if stop < 0:
            self._body = head.body
            self._write(data)
        else:
            self._finish(data, end + len(header) + stop)

    def _finish(self, data: bytes, end: int) -> None:
        """The response ends at `end`; bytes behind it are nobody's, and spoil the connection."""
        exchange = self.exchange
        assert exchange is not None
        clean = end == len(data)
        self._write(data if clean else data[:end])
        exchange.complete(reuse=clean and self._head.keep_alive)

    # The end of the connection

    def eof_received(self) -> None:
        self._lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(exc)

    def _lost(self, error: Exception | None) -> None:
        if self.exchange is None:
            self._drop_idle()
        elif error is None and isinstance(self._body, UntilClose):
            self.exchange.complete(reuse=False)
        else:
            self._fail(f"connection lost: {error}" if error else "connection closed")

    def _drop_idle(self) -> None:
        if self in self.endpoint.idle:
            self.endpoint.idle.remove(self)
        self.discard()

    def _fail(self, reason: str) -> None:
        if self.exchange:
            self.exchange.fail(reason)


def take_idle(endpoint: Endpoint, now_s: float) -> Upstream | None:
    """The most recently used idle connection that can take a request; drops those that cannot."""
    while endpoint.idle:
        upstream = endpoint.idle.pop()
        if upstream.reusable(now_s):
            return upstream
        upstream.discard()
    return None


def drop_idle(endpoint: Endpoint, now_s: float | None = None) -> None:
    """Closes idle connections that idled too long; all of them without a time."""
    kept: list[Upstream] = []
    for upstream in endpoint.idle:
        if now_s is None or upstream.idle_too_long(now_s):
            upstream.discard()
        else:
            kept.append(upstream)
    endpoint.idle = kept


def _readable(fd: int) -> bool:
    """Whether a read would return at once: an idle connection then holds an end of stream."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
