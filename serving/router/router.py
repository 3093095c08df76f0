"""The router as an object: its own event loop in its own thread, started and stopped.

Usable without Ray, by tests and by benchmarks of the router itself; `actor.py` wraps it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import uvloop

from serving.router.client import Client
from serving.router.core import Core
from serving.router.endpoint import url_of
from serving.router.policy import make_policy
from serving.router.probe import probe_all

COOLDOWN_S: Final = 5.0
"""How long an opened circuit keeps requests away from an endpoint."""

_BACKLOG: Final = 4096
_CALL_DEADLINE_S: Final = 10.0  # of a call onto the loop, which is never blocked this long
_TEND_EVERY_S: Final = 1.0
_DRAIN_POLL_S: Final = 0.02

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How a router works.

    Attributes:
        policy: One of `serving.router.policy.POLICIES`.
        seed: Of the `random` policy.
        connect_timeout_s: Deadline to open a connection to an endpoint.
        cooldown_s: How long an opened circuit keeps requests away.
        processes: Routers that listen on the same port, each in a process of its own. Above 1
            they share it (`SO_REUSEPORT`): the kernel spreads connections, not requests, over
            them, and each has policy turns, circuits and counters of its own.
        process: Which of them this one is, from 0. The first is started before the others, and
            finds out whether somebody else is on the port.
    """

    policy: str = "round_robin"
    seed: int = 0
    connect_timeout_s: float = 5.0
    cooldown_s: float = COOLDOWN_S
    processes: int = 1
    process: int = 0


class RouterError(RuntimeError):
    """The router could not do what was asked; says what, why and how to mend it."""


class Router:
    """An HTTP router in front of the API servers of a group of ranks.

    It forwards bytes as they arrive in both directions, inserts `x-ep-ray-endpoint` into
    response heads, never retries, and counts by endpoint and by the role that the request
    header `x-ep-ray-role` names. `GET /ep_ray/status` and `GET /status` answer `status()`.

    It sets no deadline on responses and none on idle clients: those are the client's. A
    client that leaves is passed on to the endpoint at once.

    All methods may be called from any thread.
    """

    def __init__(
        self, name: str, host: str = "127.0.0.1", port: int = 0, settings: Settings = Settings()
    ) -> None:
        """`port` 0 takes a free one. Raises `ValueError` for an unknown policy."""
        make_policy(settings.policy, settings.seed)
        self.name = name
        self._address = (host, port)
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.AbstractServer
        self._core: Core | None = None

    def start(self) -> str:
        """Listens; returns the router's URL. Raises `RouterError`, for a taken port too."""
        if self._thread is not None:
            raise RouterError(f"router {self.name} was started already")
        listener = _listen(self.name, *self._address, self._settings)
        host, port = listener.getsockname()[:2]
        url = url_of(host, port)
        self._loop = uvloop.new_event_loop()
        core = Core(self.name, url, self._loop, self._settings)
        self._core = core
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"router:{self.name}", daemon=True
        )
        self._thread.start()
        self._await(self._serve(core, listener), _CALL_DEADLINE_S)
        return url

    async def _serve(self, core: Core, listener: socket.socket) -> None:
        self._server = await self._loop.create_server(
            lambda: Client(core), sock=listener, backlog=_BACKLOG
        )
        self._tend(core)

    def _tend(self, core: Core) -> None:
        core.tend()
        self._loop.call_later(_TEND_EVERY_S, self._tend, core)

    # Owner

    def set_endpoints(
        self,
        endpoints: Sequence[tuple[str, str]],
        desired: int | None = None,
        parallelism: Mapping[str, object] | None = None,
    ) -> None:
        """Names the endpoints that take requests from now on; an empty list takes none.

        Args:
            endpoints: Pairs of name and `http://host:port`. Requests on their way to
                endpoints that are no longer named finish; their counters stay.
            desired: How many the group should have when complete; null takes their number.
            parallelism: What the owner declares about the group, shown in the status.

        Raises:
            ValueError: A name that is given twice or does not fit a header, or a bad URL.
        """
        self._call(lambda core: core.set_endpoints(endpoints, desired, parallelism))

    def use(self, policy: str) -> None:
        """Chooses endpoints by another policy from now on; each keeps its own turns meanwhile.

        Raises:
            ValueError: Unknown policy, or requests are on their way.
        """
        self._call(lambda core: core.use(policy))

    def counters(self) -> dict[str, dict[str, dict[str, int]]]:
        """`{endpoint: {role: {forwarded, complete, failed, aborted, retried}}}`, one instant."""
        return self._call(Core.counters)

    def status(self) -> dict[str, Any]:
        """The status document, JSON-ready.

        Keys: name, url, policy, draining, desired_endpoints, ready_endpoints, parallelism,
        unrouted (503s by role) and endpoints: name, url, registered (the owner names it),
        healthy (its circuit is closed), in_selection (both), circuit, in_flight, counters.
        `processes` share the port, and circuits and counts are those of `counts_of`: of
        `process0`, ... where they are several, or of `all processes`.
        """
        return self._call(Core.status)

    def probe(self, timeout_s: float = 5.0) -> dict[str, str | None]:
        """Asks each registered endpoint for `/health`: None, or what is wrong, by name.

        Uncounted, and without effect on circuits.
        """
        targets = self._call(
            lambda core: [(e.name, e.host, e.port) for e in core.endpoints.values() if e.registered]
        )
        return self._await(probe_all(targets, timeout_s), timeout_s + _CALL_DEADLINE_S)

    def stop(self, drain_s: float = 0.0) -> int:
        """Stops listening at once, lets requests finish for `drain_s`, then ends the rest.

        Returns the number of requests that were cut off. A second stop does nothing.
        """
        thread, self._thread = self._thread, None
        if thread is None or self._core is None:
            return 0
        try:
            return self._submit(self._drain(self._core, drain_s), drain_s + _CALL_DEADLINE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(_CALL_DEADLINE_S)
            if not thread.is_alive():
                self._loop.close()

    async def _drain(self, core: Core, drain_s: float) -> int:
        self._server.close()
        core.drain()
        deadline_s = self._loop.time() + drain_s
        while core.clients and self._loop.time() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        cut_off = core.abort()
        await asyncio.sleep(0)  # the closed transports tell their protocols
        return cut_off

    # Onto the loop

    def _call(self, function: Callable[[Core], T]) -> T:
        """Runs a function between two events of the loop; directly when the router has stopped."""
        if self._core and not self._thread:
            return function(self._core)

        async def run() -> T:
            assert self._core
            return function(self._core)

        return self._await(run(), _CALL_DEADLINE_S)

    def _await(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        if self._thread is None:
            work.close()
            raise RouterError(f"router {self.name} is not running: call start() first")
        return self._submit(work, deadline_s)

    def _submit(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():  # the work itself timed out
                raise
            future.cancel()
            raise RouterError(
                f"router {self.name}: its loop did not answer within {deadline_s:.0f} s"
            ) from error


def _listen(name: str, host: str, port: int, settings: Settings) -> socket.socket:
    """A bound socket, so that a taken port is told to the caller."""
    share = settings.processes > 1
    try:
        if share and settings.process == 0:
            # Whoever shares a port is let in beside anyone of this user who does, unasked: that
            # it is taken shows only without sharing.
            _bound(host, port, False).close()
        return _bound(host, port, share)
    except OSError as error:
        raise RouterError(
            f"router {name} cannot listen on {host} port {port}: {error.strerror or error}. "
            f"Choose another with router.port=<free port> (0 takes any free one) "
            f"or router.host=<address of this machine>"
        ) from error


def _bound(host: str, port: int, share: bool) -> socket.socket:
    return socket.create_server(
        (host, port), family=_family(host), backlog=_BACKLOG, reuse_port=share
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
