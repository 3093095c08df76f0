"""The router's side towards a rank: one kept-alive connection, and the response on it."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from serving.router.framing import (
    CHUNKED,
    MAX_HEAD_BYTES,
    Chunked,
    Framing,
    FramingError,
    UntilClose,
    framing,
)
from serving.router.heads import ResponseHead, parse_response

if TYPE_CHECKING:
    from serving.router.client import Client
    from serving.router.endpoint import Endpoint
    from serving.router.exchange import Exchange

IDLE_LIMIT_S: Final = 4.0
"""Idle connections are dropped at this age: servers close theirs at 5 s (uvicorn's default)."""

_PROBE_AFTER_S: Final = 0.05  # a connection that idled longer is checked for an end of stream


class Upstream(asyncio.Protocol):
    """A connection to an endpoint, with at most one exchange on it.

    Response bytes go to the client as they arrive; only the head gets a line inserted. The
    framing is followed to know where the response ends, for reuse and for the counters.

    Attributes:
        endpoint: Who is at the other end.
        exchange: The request being answered.
        idle_since_s: When it was last parked, in the loop's time.
        send: Writes bytes of a request.
    """

    __slots__ = (
        "_body",
        "_chunked",
        "_fd",
        "_partial",
        "_paused",
        "_url",
        "_write",
        "endpoint",
        "exchange",
        "idle_since_s",
        "send",
        "transport",
    )

    transport: asyncio.Transport
    send: Callable[[bytes], None]
    _write: Callable[[bytes], None]

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._url = endpoint.url
        self.exchange: Exchange | None = None
        self._body: Framing | None = None  # None until the response's head is complete
        self._chunked = Chunked()
        self._partial = b""
        self._paused = False
        self.idle_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.send = self.transport.write
        self._fd: int = transport.get_extra_info("socket").fileno()

    # One request after the other

    def attach(self, exchange: Exchange, client: Client) -> None:
        """Begins an exchange; the response goes to `client`."""
        self.exchange = exchange
        self._write = client.write
        if client.write_paused:
            self.pause(True)

    def park(self, now_s: float) -> None:
        """Keeps the connection for a later request, unless the endpoint has moved since."""
        if self._url != self.endpoint.url or self.transport.is_closing():
            self.discard()
            return
        self.exchange = None
        self._body = None
        if self._paused:
            self.pause(False)
        self.idle_since_s = now_s
        self.endpoint.idle.append(self)

    def discard(self) -> None:
        """Closes the connection at once; the rank sees that nobody waits any more."""
        self.exchange = None
        self.transport.abort()

    def reusable(self, now_s: float) -> bool:
        """Whether an idle connection can take a request: young, and not closed by the server."""
        if self.transport.is_closing():
            return False
        idle_s = now_s - self.idle_since_s
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
        try:
            if self._body is None:
                self._head_received(data)
                return
            end = self._body.feed(data)
        except FramingError as error:
            self._fail(str(error))
            return
        if end < 0:
            self._write(data)
        else:
            self._finish(data, end, 0)

    def _head_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:  # an idle connection has nothing to say
            self._drop_idle()
            return
        if self._partial:
            data = self._partial + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._keep_partial(data)
                return
            head = parse_response(data[:end], exchange.head_request, self.endpoint.header)
            if head.status >= 200:
                break
            data = self._pass_interim(head, data, end)
        exchange.answered = head
        stop = end + head.length  # of a body of known length
        if head.length < 0 or stop > len(data):
            body = self._chunked if head.length == CHUNKED else framing(head.length)
            stop = body.feed(data, end)
            if stop < 0:
                self._partial = b""
                self._body = body
                self._write(head.forward + data[end:])
                return
        self._partial = b""
        self._finish(head.forward + data[end:], stop, len(head.forward) - end)

    def _keep_partial(self, data: bytes) -> None:
        self._partial = data
        if len(data) > MAX_HEAD_BYTES:
            raise FramingError(f"no end of head in {len(data)} bytes")

    def _pass_interim(self, head: ResponseHead, data: bytes, end: int) -> bytes:
        """Passes a 1xx head on as it is (`100 Continue`); returns what is behind it."""
        if head.status == 101:
            raise FramingError("the router does not pass on protocol upgrades")
        self._write(data[:end])
        return data[end:]

    def _finish(self, data: bytes, end: int, shift: int) -> None:
        """The response ends at `end` + `shift`; what is behind is nobody's and spoils reuse."""
        exchange = self.exchange
        assert exchange is not None
        assert exchange.answered is not None
        end += shift
        clean = end == len(data)
        self._write(data if clean else data[:end])
        exchange.complete(clean and exchange.answered.keep_alive)

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
        if now_s is None or now_s - upstream.idle_since_s >= IDLE_LIMIT_S:
            upstream.discard()
        else:
            kept.append(upstream)
    endpoint.idle = kept


def _readable(fd: int) -> bool:
    """Whether a read would return at once: an idle connection then holds an end of stream."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
