"""The ranks behind the router: their counters and circuits. Pure: no sockets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from serving.router.upstream import Upstream

FAILURES_TO_OPEN: Final = 3
"""Consecutive connection errors or 5xx responses that open an endpoint's circuit."""

Outcome = Literal["complete", "failed", "aborted"]


@dataclass(slots=True)
class Tally:
    """Counters of one endpoint and role: forwarded = complete + failed + aborted + in flight.

    Attributes:
        forwarded: Requests given to this endpoint.
        complete: Whole responses below status 400 passed to the client.
        failed: Responses from status 400 on, and requests whose endpoint did not answer in full.
        aborted: Requests whose client left before the end of the response.
        retried: Always 0: the router never sends a request twice.
    """

    forwarded: int = 0
    complete: int = 0
    failed: int = 0
    aborted: int = 0
    retried: int = 0

    @property
    def in_flight(self) -> int:
        """Requests without an end yet."""
        return self.forwarded - self.complete - self.failed - self.aborted


class CircuitState(Enum):
    """`open` takes no request; `half_open` waits for the outcome of one trial request."""

    closed = "closed"
    open = "open"
    half_open = "half_open"


class Circuit:
    """Keeps requests away from an endpoint that fails. Times are seconds of one clock.

    Only connection errors and 5xx count as failures: a 4xx says that the endpoint works
    (vllm-router#60).

    Attributes:
        failures: In a row. Without one the circuit is closed.
    """

    __slots__ = ("_cooldown_s", "_opened_s", "failures", "state")

    def __init__(self, cooldown_s: float) -> None:
        self._cooldown_s = cooldown_s
        self.failures = 0
        self._opened_s = 0.0
        self.state = CircuitState.closed

    def allows(self, now_s: float) -> bool:
        """Whether the next request may go to this endpoint."""
        if self.state is CircuitState.closed:
            return True
        return self.state is CircuitState.open and now_s >= self._opened_s + self._cooldown_s

    def claim(self) -> None:
        """Notes that an allowed request was assigned; behind a cool-down it is the trial."""
        if self.state is CircuitState.open:
            self.state = CircuitState.half_open

    def succeeded(self) -> None:
        """The endpoint answered below 500."""
        self.failures = 0
        self.state = CircuitState.closed

    def failed(self, now_s: float) -> None:
        """The endpoint could not be reached, broke off or answered 5xx."""
        self.failures += 1
        if self.state is CircuitState.half_open or self.failures >= FAILURES_TO_OPEN:
            self.state, self._opened_s = CircuitState.open, now_s

    def undecided(self) -> None:
        """The client left: a trial says nothing, so the next request is the trial."""
        if self.state is CircuitState.half_open:
            self.state = CircuitState.open


class Endpoint:
    """One rank's API server.

    Attributes:
        name: Name in the ledger and in the `x-ep-ray-endpoint` header.
        url: `http://host:port`.
        registered: Whether the owner's last list names it. Others stay for their counters.
        idle: Kept-alive connections without a request, the longest idle first.
    """

    __slots__ = (
        "_cooldown_s",
        "circuit",
        "header",
        "host",
        "idle",
        "name",
        "port",
        "registered",
        "tallies",
        "url",
    )

    def __init__(self, name: str, url: str, cooldown_s: float) -> None:
        self.name = name
        self.header = f"x-ep-ray-endpoint: {name}\r\n".encode("latin-1")
        self.idle: list[Upstream] = []
        self.tallies: dict[str, Tally] = {}
        self._cooldown_s = cooldown_s
        self.move(url)

    def move(self, url: str) -> None:
        """Points at a (restarted) server; counters stay. Raises `ValueError` on a bad URL."""
        self.host, self.port = split_url(url)
        self.url = url
        self.registered = True
        self.circuit = Circuit(self._cooldown_s)

    def tally(self, role: str) -> Tally:
        """The counters of `role`, made when first asked for."""
        if role not in self.tallies:
            self.tallies[role] = Tally()
        return self.tallies[role]

    @property
    def in_flight(self) -> int:
        """Counted requests without an end yet, all roles."""
        return sum(tally.in_flight for tally in self.tallies.values())

    def counters(self) -> dict[str, dict[str, int]]:
        """Counters by role, as plain data."""
        return {role: asdict(tally) for role, tally in self.tallies.items()}

    def status(self) -> dict[str, object]:
        """This endpoint's part of the status document."""
        healthy = self.circuit.state is CircuitState.closed
        return {
            "name": self.name,
            "url": self.url,
            "registered": self.registered,
            "healthy": healthy,
            "in_selection": self.registered and healthy,
            "circuit": self.circuit.state.value,
            "in_flight": self.in_flight,
            "counters": self.counters(),
        }


def url_of(host: str, port: int) -> str:
    """`http://host:port`, with the brackets that IPv6 needs."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def split_url(url: str) -> tuple[str, int]:
    """Host and port of `http://host:port`; raises `ValueError` on anything else."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ValueError(f"endpoint URL {url!r} is not http://host:port, which the router needs")
    return parts.hostname, parts.port or 80
