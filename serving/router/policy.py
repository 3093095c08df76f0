"""Which endpoint takes the next request. Pure: no sockets, no clock of its own."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from serving.router.endpoint import Endpoint


class Policy(Protocol):
    """Chooses among endpoints whose circuit allows a request."""

    endpoints: list[Endpoint]

    def assign(self, endpoints: Iterable[Endpoint]) -> None:
        """Takes these endpoints from now on; a changed list begins with its first."""

    def choose(self, session: bytes | None, now_s: float) -> Endpoint | None:
        """The endpoint of the next request; None when none is available."""


class RoundRobin:
    """Exact round robin: n requests over k available endpoints differ by at most one."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []
        self._turn = 0

    def assign(self, endpoints: Iterable[Endpoint]) -> None:
        """See `Policy.assign`."""
        endpoints = list(endpoints)
        if endpoints != self.endpoints:
            self.endpoints = endpoints
            self._turn = 0

    def choose(self, session: bytes | None, now_s: float) -> Endpoint | None:
        """See `Policy.choose`."""
        turn, endpoints = self._turn, self.endpoints
        if endpoints and not endpoints[turn].circuit.failures:  # nearly always
            self._turn = (turn + 1) % len(endpoints)
            return endpoints[turn]
        index = _first_allowed(endpoints, turn, now_s)
        if index is None:
            return None
        self._turn = (index + 1) % len(endpoints)
        return endpoints[index]


class LeastInFlight(RoundRobin):
    """Fewest counted requests in flight; equals take turns."""

    def choose(self, session: bytes | None, now_s: float) -> Endpoint | None:
        """See `Policy.choose`."""
        size = len(self.endpoints)
        in_turn = [(self._turn + step) % size for step in range(size)]
        allowed = [i for i in in_turn if self.endpoints[i].circuit.allows(now_s)]
        if not allowed:
            return None
        index = min(allowed, key=lambda i: self.endpoints[i].in_flight)
        self._turn = (index + 1) % size
        return self.endpoints[index]


class Session(RoundRobin):
    """One endpoint for each session, while the set of endpoints stays and its circuit is closed.

    The choice is a checksum of the session's name, so that every process of a router makes the
    same one. Requests without a session go round.
    """

    def choose(self, session: bytes | None, now_s: float) -> Endpoint | None:
        """See `Policy.choose`."""
        if session is None:
            return super().choose(None, now_s)
        index = _first_allowed(self.endpoints, zlib.crc32(session), now_s)
        return None if index is None else self.endpoints[index]


class Random(RoundRobin):
    """Uniform and independent; the sequence of choices follows from the seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def choose(self, session: bytes | None, now_s: float) -> Endpoint | None:
        """See `Policy.choose`."""
        allowed = [e for e in self.endpoints if e.circuit.allows(now_s)]
        return self._random.choice(allowed) if allowed else None


POLICIES = ("round_robin", "random", "least_inflight", "session")


def make_policy(name: str, seed: int) -> Policy:
    """A policy by its name in the configuration. Raises `ValueError` for another name."""
    if name == "random":
        return Random(seed)
    kinds = {"round_robin": RoundRobin, "least_inflight": LeastInFlight, "session": Session}
    if name not in kinds:
        raise ValueError(f"router policy {name!r}: choose one of {', '.join(POLICIES)}")
    return kinds[name]()


def _first_allowed(endpoints: Sequence[Endpoint], turn: int, now_s: float) -> int | None:
    """Index of the first available endpoint from `turn` on, once round."""
    size = len(endpoints)
    for step in range(turn, turn + size):
        circuit = endpoints[step % size].circuit
        if not circuit.failures or circuit.allows(now_s):
            return step % size
    return None
