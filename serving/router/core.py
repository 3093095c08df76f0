"""What all connections of a router share. Lives on the router's loop; no locks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING

from serving.router.combined import ALL_PROCESSES
from serving.router.endpoint import Endpoint, split_url
from serving.router.heads import RequestHead
from serving.router.policy import RoundRobin, make_policy
from serving.router.upstream import drop_idle

if TYPE_CHECKING:
    from serving.router.client import Client
    from serving.router.router import Settings


class Core:
    """Endpoints, turns and counters.

    Only `POST /v1/...` requests are counted and take turns by the policy. All others
    (`GET /v1/models`, `/health`, `/metrics`, ...) go round the endpoints by a cursor of their
    own, uncounted, and never open a circuit.

    Attributes:
        name: Of the router, in the status document.
        url: Where it listens.
        processes: Routers that share its port, itself included.
        counts_of: What its counts and circuits are of, in words.
        policy: How an endpoint is chosen, by name.
        loop: The loop that all connections live on.
        time: Its clock, in seconds.
        connect_timeout_s: Deadline to open a connection to an endpoint.
        cooldown_s: How long an opened circuit keeps requests away.
        endpoints: All that were ever named, by name; those that left stay for their counters.
        clients: Open client connections.
        unrouted: Counted requests that found no endpoint (503), by role.
        draining: Whether responses close their connection, because the router stops.
    """

    def __init__(
        self,
        name: str,
        url: str,
        loop: asyncio.AbstractEventLoop,
        settings: Settings,
    ) -> None:
        self.name = name
        self.url = url
        self.loop = loop
        self.time = loop.time
        self.connect_timeout_s = settings.connect_timeout_s
        self.cooldown_s = settings.cooldown_s
        self.processes = settings.processes
        shared = settings.processes > 1
        self.counts_of = f"process{settings.process}" if shared else ALL_PROCESSES
        self.policy = settings.policy
        self.endpoints: dict[str, Endpoint] = {}
        self.clients: set[Client] = set()
        self.unrouted: dict[str, int] = {}
        self.draining = False
        self._seed = settings.seed
        self._policy = make_policy(settings.policy, settings.seed)
        self._policies = {settings.policy: self._policy}
        self._others = RoundRobin()
        self._desired = 0
        self._parallelism: dict[str, object] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # Owner

    def set_endpoints(
        self,
        endpoints: Sequence[tuple[str, str]],
        desired: int | None,
        parallelism: Mapping[str, object] | None,
    ) -> None:
        """See `Router.set_endpoints`."""
        names = [name for name, _ in endpoints]
        _check(endpoints)
        for name, endpoint in self.endpoints.items():
            if name not in names:
                endpoint.registered = False
                drop_idle(endpoint)
        for name, url in endpoints:
            self._register(name, url)
        for policy in (*self._policies.values(), self._others):
            policy.assign(self.endpoints[name] for name in names)
        self._desired = len(names) if desired is None else desired
        if parallelism is not None:
            self._parallelism = dict(parallelism)

    def use(self, name: str) -> None:
        """See `Router.use`."""
        if self.in_flight and name != self.policy:
            raise ValueError(f"router {self.name} has {self.in_flight} requests on their way")
        if name not in self._policies:
            policy = make_policy(name, self._seed)
            policy.assign(self._policy.endpoints)
            self._policies[name] = policy
        self.policy, self._policy = name, self._policies[name]

    def _register(self, name: str, url: str) -> None:
        known = self.endpoints.get(name)
        if known is None:
            self.endpoints[name] = Endpoint(name, url, self.cooldown_s)
        elif known.url != url or not known.registered:
            drop_idle(known)
            known.move(url)

    # Requests

    def choose(self, head: RequestHead) -> Endpoint | None:
        """Who takes this request; None when no endpoint is available."""
        now_s = self.time()
        if not head.counted:
            return self._others.choose(None, now_s)
        endpoint = self._policy.choose(head.session, now_s)
        if endpoint is None:
            self.unrouted[head.role] = self.unrouted.get(head.role, 0) + 1
        elif endpoint.circuit.failures:
            endpoint.circuit.claim()
        return endpoint

    def why_none(self) -> str:
        """Why no endpoint is available, and what mends it."""
        if not self._policy.endpoints:
            return f"router {self.name} has no endpoint: its owner named none (set_endpoints)"
        states = ", ".join(f"{e.name} {e.circuit.state.value}" for e in self._policy.endpoints)
        return (
            f"router {self.name} has no available endpoint, circuits: {states}; a circuit opens "
            f"on repeated connection errors or 5xx and is tried again after {self.cooldown_s} s"
        )

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs a connection attempt; kept here so that it is neither lost nor left behind."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def tend(self) -> None:
        """Once a second: drops connections that idled too long."""
        now_s = self.time()
        for endpoint in self.endpoints.values():
            if endpoint.idle:
                drop_idle(endpoint, now_s)

    # Documents

    def counters(self) -> dict[str, dict[str, dict[str, int]]]:
        """Counters by endpoint and role."""
        return {name: endpoint.counters() for name, endpoint in self.endpoints.items()}

    def status(self) -> dict[str, object]:
        """The status document; keys are described in `Router.status`."""
        endpoints = [endpoint.status() for endpoint in self.endpoints.values()]
        return {
            "name": self.name,
            "url": self.url,
            "policy": self.policy,
            "draining": self.draining,
            "desired_endpoints": self._desired,
            "ready_endpoints": sum(bool(endpoint["in_selection"]) for endpoint in endpoints),
            "parallelism": self._parallelism,
            "processes": self.processes,
            "counts_of": self.counts_of,
            "unrouted": dict(self.unrouted),
            "endpoints": endpoints,
        }

    # End

    @property
    def in_flight(self) -> int:
        """Client connections with a request on its way."""
        return sum(client.exchange is not None for client in self.clients)

    def drain(self) -> None:
        """Closes what is idle; connections with a request close behind their response."""
        self.draining = True
        for client in list(self.clients):
            if client.exchange is None:
                client.transport.close()

    def abort(self) -> int:
        """Ends everything at once; returns how many requests that cut off."""
        cut_off = self.in_flight
        for task in list(self._tasks):
            task.cancel()
        for client in list(self.clients):
            if client.exchange:
                client.exchange.abort()
            client.transport.abort()
        for endpoint in self.endpoints.values():
            drop_idle(endpoint)
        return cut_off


def _check(endpoints: Sequence[tuple[str, str]]) -> None:
    """Raises `ValueError` for a list that the ledger could not tell apart."""
    names = [name for name, _ in endpoints]
    for name, url in endpoints:
        split_url(url)
        if names.count(name) > 1:
            raise ValueError(f"endpoint name {name!r} is given {names.count(name)} times")
        if not name.isascii() or not name.isprintable() or not name or name != name.strip():
            raise ValueError(f"endpoint name {name!r} does not fit a header: use printable ASCII")
