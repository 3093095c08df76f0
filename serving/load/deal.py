"""One cell sent by several clients: who sends which request, and one record of it all.

Places count the requests in the order in which one client would take them up: what is not measured
first. The request at place p goes to target p mod R of R targets, whoever sends it, so that round
robin over the targets stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from serving.load.metrics import cell_record
from serving.load.records import CellRecord, Request, RequestRecord
from serving.load.target import Target


@dataclass(slots=True)
class Part:
    """What one of the clients sends; arguments of `run_cell`.

    Attributes:
        concurrency: Its share of the requests in flight.
        targets: One for each of its requests.
        requests: In the order of their places.
        arrivals_ns: Open loop: when each of its measured requests is sent.
    """

    concurrency: int
    targets: list[Target] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    arrivals_ns: list[int] | None = None


def in_order(requests: Sequence[Request]) -> list[Request]:
    """Requests by place: what is not measured first."""
    return sorted(requests, key=lambda request: request.role == "measured")


def shares(concurrency: int, clients: int) -> list[int]:
    """Requests in flight of each client: their sum is `concurrency`, and none has two more."""
    return [(concurrency + clients - 1 - client) // clients for client in range(clients)]


def turns(requests: int, clients: int, concurrency: int | None, targets: int) -> list[int]:
    """The client of each request: in turn, and so that no client is tied to one target.

    In a closed loop those with one more place in flight get as many more requests. Where clients
    and targets would turn in step, the turn moves on by one after each round of both.

    Args:
        requests: Of one phase.
        clients: Of them `concurrency` take part where there are more.
        concurrency: Places in flight of a closed loop; None in an open one.
        targets: Over which the requests go in turn.
    """
    slots = clients
    if concurrency is not None and concurrency % clients:
        slots = concurrency
    both = math.lcm(slots, targets)
    in_step = both < slots * targets
    moved = [i + (i // both if in_step else 0) for i in range(requests)]
    return [turn % slots % clients for turn in moved]


def deal(
    targets: Sequence[Target],
    requests: Sequence[Request],
    concurrency: int,
    clients: int,
    arrivals_ns: Sequence[int] | None = None,
) -> list[Part]:
    """Splits a cell between clients.

    Args:
        targets: Where requests go, in turn.
        requests: All roles.
        concurrency: Requests in flight of all clients together; of an open loop, in its warm-up,
            where no client has fewer than one.
        clients: Number of them.
        arrivals_ns: Open loop: when each measured request is sent.

    Returns:
        A part for each client.

    Raises:
        ValueError: A closed loop has fewer requests in flight than clients.
    """
    if arrivals_ns is None and concurrency < clients:
        raise ValueError(f"concurrency {concurrency} cannot be split between {clients} clients")
    parts = [Part(max(1, share)) for share in shares(concurrency, clients)]
    ordered = in_order(requests)
    warm = sum(request.role != "measured" for request in ordered)
    slots = concurrency if arrivals_ns is None else None
    owners = turns(warm, clients, slots, len(targets))
    owners += (measured := turns(len(ordered) - warm, clients, slots, len(targets)))
    for place, (owner, request) in enumerate(zip(owners, ordered, strict=True)):
        parts[owner].requests.append(request)
        parts[owner].targets.append(targets[place % len(targets)])
    for client, part in enumerate(parts):
        part.targets = part.targets or [targets[0]]  # of a client without requests
        if arrivals_ns is not None:
            pairs = zip(measured, arrivals_ns, strict=True)
            part.arrivals_ns = [at for owner, at in pairs if owner == client]
    return parts


def merge(
    targets: Sequence[Target], requests: Sequence[Request], records: Sequence[CellRecord]
) -> CellRecord:
    """One record of what several clients of one host sent, as one client would have left it.

    Args:
        targets: As given to `deal`.
        requests: Likewise.
        records: Of each client.
    """
    places = {request.request_id: place for place, request in enumerate(in_order(requests))}
    several = len(set(targets)) > 1
    merged = sorted(
        (request for record in records for request in record.requests),
        key=lambda request: places[request.request_id],
    )
    if several:
        names = [targets[places[r.request_id] % len(targets)].name for r in merged]
        merged = [_named(r, name) for r, name in zip(merged, names, strict=True)]
    return cell_record(
        merged,
        client_lag_p99_ns=max(record.client_lag_p99_ns for record in records),
        client_cpu_ns=sum(record.client_cpu_ns for record in records),
        replaced_connections=sum(record.replaced_connections for record in records),
        clock_offset_ns=records[0].clock_offset_ns,
        stopped=any(record.stopped for record in records),
    )


def _named(record: RequestRecord, target: str) -> RequestRecord:
    """With its endpoint: a client whose requests all had one target does not name it."""
    return record if record.endpoint is not None else replace(record, endpoint=target)
