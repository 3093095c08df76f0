"""One request on its way: from the choice of an endpoint to one terminal state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from serving.router.framing import UntilClose
from serving.router.upstream import Upstream, take_idle

if TYPE_CHECKING:
    from serving.router.client import Client
    from serving.router.endpoint import Endpoint, Outcome, Tally
    from serving.router.heads import ResponseHead

_PENDING_BYTES: Final = 1 << 20  # of a request body while its connection is being opened


class Exchange:
    """A request and its response. There is no retry: one endpoint, one terminal state.

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

    def __init__(
        self, client: Client, endpoint: Endpoint, tally: Tally | None, head_request: bool
    ) -> None:
        """`tally` is None for requests that are not counted."""
        self.client = client
        self.endpoint = endpoint
        self.head_request = head_request
        self.answered: ResponseHead | None = None
        self.upstream: Upstream | None = None
        self._circuit = endpoint.circuit  # of the server asked, should the endpoint move
        self._tally = tally
        self._pending: list[bytes] = []
        self._done = False

    def start(self, data: bytes) -> None:
        """Sends the request's first bytes on an idle connection, or opens one."""
        if self._tally:
            self._tally.forwarded += 1
        upstream = take_idle(self.endpoint, self.client.core.loop.time())
        if upstream is not None:
            self._attach(upstream)
            upstream.transport.write(data)
        else:
            self._pending.append(data)
            self.client.core.spawn(self._connect())

    def send(self, data: bytes) -> None:
        """Sends more of the request's body."""
        if self.upstream:
            self.upstream.transport.write(data)
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
            upstream.park(self.client.core.loop.time())
            return
        self._attach(upstream)
        self.client.pause(False)
        upstream.transport.writelines(self._pending)
        self._pending.clear()

    def _attach(self, upstream: Upstream) -> None:
        self.upstream = upstream
        upstream.attach(self, self.client.transport.write)
        if self.client.write_paused:
            upstream.pause(True)

    # The terminal states

    def complete(self, reuse: bool) -> None:
        """The whole response was passed on. `reuse`: whether its connection stays usable."""
        assert self.answered is not None
        assert self.upstream is not None
        failed = self.answered.status >= 400
        self._end("failed" if failed else "complete")
        if self._tally:
            self._judge(self.answered.status < 500)
        if reuse and not self.client.sending:
            self.upstream.park(self.client.core.loop.time())
        else:
            self.upstream.discard()
        self.client.finished(self.answered.keep_alive)

    def fail(self, reason: str) -> None:
        """The endpoint did not answer in full: 502, or a broken stream once it had begun."""
        if self._done:
            return
        self._end("failed")
        self._judge(False)
        if self.upstream:
            self.upstream.discard()
        if self.answered is None:
            self.client.bad_gateway(self.endpoint, reason)
        else:
            self.client.break_off(reset=isinstance(self.answered.body, UntilClose))

    def abort(self) -> None:
        """The client left: the endpoint's connection is closed, so that it stops generating."""
        self._end("aborted")
        if self._tally:
            self._circuit.undecided()
        if self.upstream:
            self.upstream.discard()

    def _end(self, outcome: Outcome) -> None:
        self._done = True
        self.client.exchange = None
        if self._tally:
            setattr(self._tally, outcome, getattr(self._tally, outcome) + 1)

    def _judge(self, good: bool) -> None:
        """Tells the circuit; requests that are not counted do not touch it."""
        if not self._tally:
            return
        if good:
            self._circuit.succeeded()
        else:
            self._circuit.failed(self.client.core.loop.time())
