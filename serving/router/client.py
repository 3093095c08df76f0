"""The router's side towards a client: requests in order, on one kept-alive connection."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from serving.router.exchange import Exchange
from serving.router.framing import MAX_HEAD_BYTES, Framing, FramingError, framing
from serving.router.heads import RequestHead, request_head

if TYPE_CHECKING:
    from serving.router.core import Core
    from serving.router.endpoint import Endpoint

STATUS_PATHS: Final = (b"/ep_ray/status", b"/status")
_PIPELINED_BYTES: Final = 1 << 16  # of later requests, held while one is being answered
_FLUSH_DEADLINE_S: Final = 5.0  # for a client to take what came before a broken stream's end
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    431: "Request Header Fields Too Large",
    502: "Bad Gateway",
    503: "Service Unavailable",
}


class Client(asyncio.Protocol):
    """A client's connection, with at most one exchange on it; later requests wait their turn.

    Attributes:
        core: What all connections share.
        exchange: The request being answered.
        write: Writes bytes of a response.
        write_paused: Whether the client takes bytes more slowly than they come.
    """

    __slots__ = (
        "_body",
        "_buffer",
        "_exchange",
        "_keep_alive",
        "_paused",
        "core",
        "exchange",
        "transport",
        "write",
        "write_paused",
    )

    transport: asyncio.Transport
    write: Callable[[bytes], None]

    def __init__(self, core: Core) -> None:
        self.core = core
        self.exchange: Exchange | None = None
        self._exchange = Exchange(self)  # the one that takes every request in turn
        self.write_paused = False
        self._body: Framing | None = None  # of a request whose end has not arrived
        self._buffer = b""  # received, not yet begun
        self._keep_alive = True
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.write = self.transport.write
        self.core.clients.add(self)
        if self.core.draining:
            transport.close()

    @property
    def sending(self) -> bool:
        """Whether the request's body is still arriving."""
        return self._body is not None

    # Requests

    def data_received(self, data: bytes) -> None:
        if self._body is not None:
            self._body_received(self._body, data)
            return
        if self._buffer:
            data = self._buffer + data
        if self.exchange is None:
            if self._begin(data) and self._buffer:
                self._advance()
            return
        self._buffer = data
        if len(data) > _PIPELINED_BYTES:
            self.pause(True)

    def _advance(self) -> None:
        """Begins requests until one has to be waited for."""
        while self._buffer and not self.exchange and not self._body:
            if self.transport.is_closing() or not self._begin(self._buffer):
                return

    def _begin(self, data: bytes) -> bool:
        """Begins the first request of `data`; False when its head is incomplete or refused."""
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._buffer = data
            if len(data) > MAX_HEAD_BYTES:
                self._refuse(431, f"no end of head in {len(data)} bytes")
            return False
        try:
            head = request_head(data, end)
            stop = end + head.length  # of a body of known length
            if head.length < 0 or stop > len(data):
                stop = self._await_body(framing(head.length), data, end)
        except FramingError as error:
            self._refuse(400, str(error))
            return False
        if stop == len(data):
            self._buffer = b""
        else:
            data, self._buffer = data[:stop], data[stop:]
        self._keep_alive = head.keep_alive
        self._dispatch(head, data)
        return True

    def _await_body(self, body: Framing, data: bytes, end: int) -> int:
        """Where the body that begins at `end` ends in `data`; else more of it is awaited."""
        stop = body.feed(data, end) if end < len(data) else -1
        if stop < 0:
            self._body = body
            return len(data)
        return stop

    def _dispatch(self, head: RequestHead, data: bytes) -> None:
        """Answers a request for the router itself; forwards any other."""
        core = self.core
        if head.method == b"GET" and head.target in STATUS_PATHS:
            self._reply(200, core.status())
            return
        endpoint = core.choose(head)
        if endpoint is None:
            if head.expects:
                self._keep_alive = False
            self._reply(503, _error(503, core.why_none()))
            return
        if head.expects and self._body is not None:
            self._keep_alive = False  # whether the body follows a final answer is unknowable
        tally = endpoint.tally(head.role) if head.counted else None
        self._exchange.begin(endpoint, tally, head, data)

    def _body_received(self, body: Framing, data: bytes) -> None:
        """More of a request's body; without an exchange it was answered early and is skipped."""
        try:
            stop = body.feed(data)
        except FramingError as error:
            if self.exchange:
                self.exchange.abort()
            self._refuse(400, str(error))
            return
        if stop >= 0:
            self._body = None
            data, self._buffer = data[:stop], data[stop:]
        if self.exchange:
            self.exchange.send(data)
        else:
            self._advance()

    # Responses

    def finished(self, keep_alive: bool) -> None:
        """The response was passed on. `keep_alive`: whether the endpoint offered to go on."""
        if not keep_alive or not self._keep_alive or self.core.draining:
            self.transport.close()
            return
        if self._paused:
            self.pause(False)
        if self._buffer:
            self._advance()

    def bad_gateway(self, endpoint: Endpoint, reason: str) -> None:
        """Answers for an endpoint that did not, and names it."""
        message = f"endpoint {endpoint.name} ({endpoint.url}): {reason}"
        self._reply(502, _error(502, message), endpoint.header)
        self.finished(True)

    def break_off(self, reset: bool) -> None:
        """Ends a response in the middle so that the client cannot take it for a whole one.

        What arrived is flushed. A length or chunked framing then lacks its end; where the end
        of the connection is the end of the body (`reset`), the connection is reset.
        """
        if reset:
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        self.transport.close()
        self.core.loop.call_later(_FLUSH_DEADLINE_S, self.transport.abort)

    def _refuse(self, status: int, reason: str) -> None:
        """Answers bytes that cannot be forwarded, and closes."""
        self._keep_alive = False
        self._reply(status, _error(status, reason))

    def _reply(self, status: int, document: object, header: bytes = b"") -> None:
        """Answers by the router itself."""
        body = json.dumps(document).encode()
        close = not self._keep_alive or self.core.draining
        self.transport.write(
            b"HTTP/1.1 %d %s\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n%b"
            % (
                status,
                _REASONS[status].encode(),
                header,
                len(body),
                b"connection: close\r\n" if close else b"",
                body,
            )
        )
        if close:
            self.transport.close()

    # Backpressure and the end of the connection

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading, because the endpoint does not take more or does again."""
        if paused != self._paused and not self.transport.is_closing():
            self._paused = paused
            if paused:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self.exchange and self.exchange.upstream:
            self.exchange.upstream.pause(True)

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.exchange and self.exchange.upstream:
            self.exchange.upstream.pause(False)

    def eof_received(self) -> None:
        """A half-closed connection counts as left; what was answered is still flushed."""
        if self.exchange:
            self.exchange.abort()
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.core.clients.discard(self)
        if self.exchange:
            self.exchange.abort()


def _error(status: int, message: str) -> dict[str, object]:
    """An error in the shape that OpenAI clients expect."""
    return {"error": {"message": message, "type": "router_error", "code": status}}
