"""One request on its way: from the choice of an endpoint to one terminal state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from serving.router.framing import UNTIL_CLOSE
from serving.router.upstream import Upstream, take_idle

if TYPE_CHECKING:
    from serving.router.client import Client
    from serving.router.endpoint import Circuit, Endpoint, Tally
    from serving.router.heads import RequestHead, ResponseHead

_PENDING_BYTES: Final = 1 << 20  # of a request body while its connection is being opened


class Exchange:
    """A request and its response. There is no retry: one endpoint, one terminal state.

    A client has one, used for its requests in turn. Behind `abort` the client is gone, so an
    exchange whose connection still opens then is never begun again.

    Attributes:
        client: Who asked.
        endpoint: Who answers.
        head_request: Whether the request is a HEAD, whose response has no body.
        answered: Head of the response; None until it was passed on.
        upstream: The connection; None while it is being opened.
    """

    __slots__ = (
        "_circuit",
        "_done",
        "_pending",
        "_tally",
        "answered",
        "client",
        "endpoint",
        "head_request",
        "upstream",
    )

    endpoint: Endpoint
    _circuit: Circuit
    _tally: Tally | None

    def __init__(self, client: Client) -> None:
        self.client = client
        self.head_request = False
        self.answered: ResponseHead | None = None
        self.upstream: Upstream | None = None
        self._pending: list[bytes] = []
        self._done = True

    def begin(
        self, endpoint: Endpoint, tally: Tally | None, head: RequestHead, data: bytes
    ) -> None:
        """Sends a request's first bytes on an idle connection, or opens one.

        `tally` is None for requests that are not counted.
        """
        self.endpoint = endpoint
        self.head_request = head.method == b"HEAD"
        self.answered = None
        self._circuit = endpoint.circuit  # of the server asked, should the endpoint move
        self._tally = tally
        self._done = False
        if tally is not None:
            tally.forwarded += 1
        client = self.client
        client.exchange = self
        upstream = take_idle(endpoint, client.core.time()) if endpoint.idle else None
        self.upstream = upstream
        if upstream is not None:
            upstream.attach(self, client)
            upstream.send(data)
        else:
            self._pending.append(data)
            client.core.spawn(self._connect())

    def send(self, data: bytes) -> None:
        """Sends more of the request's body."""
        if self.upstream:
            self.upstream.send(data)
            return
        self._pending.append(data)
        if sum(map(len, self._pending)) > _PENDING_BYTES:
            self.client.pause(True)

    async def _connect(self) -> None:
        core, endpoint = self.client.core, self.endpoint
        try:
            async with asyncio.timeout(core.connect_timeout_s):
                _, upstream = await core.loop.create_connection(
                    lambda: Upstream(endpoint), endpoint.host, endpoint.port
                )
        except TimeoutError:
            self.fail(f"no connection within {core.connect_timeout_s} s (router.connect_timeout_s)")
        except OSError as error:
            self.fail(f"cannot connect: {error}")
        else:
            self._connected(upstream)

    def _connected(self, upstream: Upstream) -> None:
        if self._done:  # the client left meanwhile, and nothing was sent
            upstream.park(self.client.core.time())
            return
        self.upstream = upstream
        upstream.attach(self, self.client)
        self.client.pause(False)
        upstream.transport.writelines(self._pending)
        self._pending.clear()

    # The terminal states

    def complete(self, reuse: bool) -> None:
        """The whole response was passed on. `reuse`: whether its connection stays usable."""
        answered, upstream, client = self.answered, self.upstream, self.client
        assert answered is not None
        assert upstream is not None
        self._done = True
        client.exchange = None
        if self._tally is not None:
            self._count(self._tally, answered.status)
        if reuse and not client.sending:
            upstream.park(client.core.time())
        else:
            upstream.discard()
        client.finished(answered.keep_alive)

    def _count(self, tally: Tally, status: int) -> None:
        if status < 400:
            tally.complete += 1
        else:
            tally.failed += 1
        if status >= 500:
            self._circuit.failed(self.client.core.time())
        elif self._circuit.failures:
            self._circuit.succeeded()

    def fail(self, reason: str) -> None:
        """The endpoint did not answer in full: 502, or a broken stream once it had begun."""
        if self._done:
            return
        self._end()
        if self._tally:
            self._tally.failed += 1
            self._circuit.failed(self.client.core.time())
        if self.answered is None:
            self.client.bad_gateway(self.endpoint, reason)
        else:
            self.client.break_off(reset=self.answered.length == UNTIL_CLOSE)

    def abort(self) -> None:
        """The client left: the endpoint's connection is closed, so that it stops generating."""
        self._end()
        if self._tally:
            self._tally.aborted += 1
            self._circuit.undecided()

    def _end(self) -> None:
        self._done = True
        self.client.exchange = None
        self._pending.clear()
        if self.upstream:
            self.upstream.discard()
