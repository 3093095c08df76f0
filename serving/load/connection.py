"""One connection of the load client, and the request that it carries.

The receive path does as little as can be done: one stamp per read, the framing, and the
bytes kept. What they say is read after the cell has ended (`decode.py`).
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Callable
from time import monotonic_ns
from typing import cast

from serving.load.http1 import HttpError, ResponseParser
from serving.load.records import CANCELLED, Request
from serving.load.target import Target


class Exchange:
    """A request on its way: what goes out, and what came back, undecoded.

    Attributes:
        request: What was asked.
        target: Where it goes.
        wire: The bytes that go out.
        enough: Asked after each read: whether it is given up now; None never.
        intended_ns: When a place in the closed loop fell free for it.
        sent_ns: Just before the first byte was written; None before that.
        end_ns: When the response ended or failed.
        stamps: Receive stamp of each read.
        offsets: Length of the body after each read.
        response: Parser that holds status, headers and body.
        reason: What broke the transport; empty if nothing did.
        aborted: Whether this client gave it up of its own accord.
    """

    __slots__ = (
        "aborted",
        "end_ns",
        "enough",
        "intended_ns",
        "offsets",
        "reason",
        "request",
        "response",
        "sent_ns",
        "stamps",
        "target",
        "wire",
    )

    def __init__(
        self,
        request: Request,
        target: Target,
        wire: bytes,
        enough: Callable[[ResponseParser], bool] | None = None,
    ) -> None:
        self.request = request
        self.target = target
        self.wire = wire
        self.enough = enough
        self.intended_ns = 0
        self.sent_ns: int | None = None
        self.end_ns = 0
        self.stamps: list[int] = []
        self.offsets: list[int] = []
        self.response = ResponseParser()
        self.reason = ""
        self.aborted = False

    def end(self, stamp_ns: int, reason: str = "", *, aborted: bool = False) -> None:
        """Notes how it ended."""
        self.end_ns, self.reason, self.aborted = stamp_ns, reason, aborted


class Connection(asyncio.Protocol):
    """A kept-alive connection. Carries one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None]
        self._timer: asyncio.TimerHandle | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self._fd: int = transport.get_extra_info("socket").fileno()
        self.is_open = True

    def usable(self) -> bool:
        """Whether a request may be sent: open, and silent since the last response.

        An idle connection on which something can be read was closed by the server or broke
        the protocol. The loop may not have told us yet, so the kernel is asked.
        """
        if not self.is_open or self._transport.is_closing():
            return False
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return not poller.poll(0)

    def send(self, exchange: Exchange, timeout_s: float) -> asyncio.Future[None]:
        """Writes the request; the future is done when the exchange has ended, either way."""
        self._exchange = exchange
        self._ended = self._loop.create_future()
        if not self.is_open:
            self._finish(monotonic_ns(), "connection closed before the request was sent")
            return self._ended
        self._timer = self._loop.call_later(timeout_s, self._time_out, timeout_s)
        exchange.sent_ns = monotonic_ns()
        self._transport.write(exchange.wire)
        return self._ended

    def abort(self, reason: str) -> None:
        """Gives the request up at once; the server sees the connection close."""
        self._finish(monotonic_ns(), reason, aborted=True)

    def close(self) -> None:
        """Closes the connection without waiting."""
        self.is_open = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        stamp_ns = monotonic_ns()
        exchange = self._exchange
        if exchange is None:
            self.close()  # bytes that nobody asked for
            return
        response = exchange.response
        ended, malformed = False, ""
        try:
            ended = response.feed(data)
        except HttpError as error:
            malformed = f"malformed response: {error}"
        # Of a malformed read too: the body may have grown before its fault.
        exchange.stamps.append(stamp_ns)
        exchange.offsets.append(response.body_bytes)
        if ended or malformed:
            self._finish(stamp_ns, malformed)
        elif exchange.enough is not None and exchange.enough(response):
            self.abort(CANCELLED)

    def eof_received(self) -> None:
        self.is_open = False
        if self._exchange is not None and self._exchange.response.feed_eof():
            self._finish(monotonic_ns())

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if (exchange := self._exchange) is None:
            return
        how = "reset" if isinstance(exc, ConnectionResetError) else "closed"
        when = "before the response ended" if exchange.stamps else "before response"
        self._finish(monotonic_ns(), f"connection {how} {when}")

    def _time_out(self, timeout_s: float) -> None:
        self._finish(monotonic_ns(), f"timeout after {timeout_s:g} s")

    def _finish(self, stamp_ns: int, reason: str = "", *, aborted: bool = False) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        exchange.end(stamp_ns, reason, aborted=aborted)
        response = exchange.response
        if reason or not response.keep_alive or response.excess:
            self.close()
        if not self._ended.done():
            self._ended.set_result(None)


async def connect(target: Target, timeout_s: float) -> Connection:
    """Opens a connection.

    Raises:
        OSError: It was refused, or there was no answer within `timeout_s` (TimeoutError).
    """
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if target.tls else None
    async with asyncio.timeout(timeout_s):
        _, connection = await loop.create_connection(
            lambda: Connection(loop), target.host, target.port, ssl=context
        )
    return connection


def connect_reason(error: OSError) -> str:
    """Why a connection could not be opened, in words."""
    if isinstance(error, TimeoutError):
        return "timeout while connecting"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return f"cannot connect: {error.strerror or error}"
