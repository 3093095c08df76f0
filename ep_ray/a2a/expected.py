"""Lower bounds in closed form, for uniform routing. Needs the standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from ep_ray.a2a.rows import Dedup


@dataclass(frozen=True)
class Links:
    """Rates of one rank in one direction, bytes/s; None where no such link is in use.

    Attributes:
        node_size: Ranks per node.
        intra: Between ranks of a node (NVLink, shared memory, loopback).
        inter: Between nodes (the rank's share of its NICs).
    """

    node_size: int
    intra: float | None
    inter: float | None


def chance(among: int, experts: int, topk: int) -> float:
    """p(e) = 1 - C(E - e, K) / C(E, K): that a token has an expert among e of E."""
    return 1.0 - comb(experts - among, topk) / comb(experts, topk)


def expected_bound_ns(
    *,
    tokens: int,
    row_bytes: int,
    experts: int,
    topk: int,
    ep: int,
    dedup: Dedup,
    links: Links,
) -> float | None:
    """Expectation of a rank's bytes under uniform routing over the link rates, in ns.

    Closed form for R = `ep` ranks, G = `node_size` per node and N = R / G nodes. It is the
    bound for many tokens; with few, the busiest rank has more than the expectation.
    """
    payload = tokens * row_bytes
    per_rank = chance(experts // ep, experts, topk)
    node = min(links.node_size, ep)
    nodes = ep // node
    nic_rows = {
        "node": (nodes - 1) * chance(experts // nodes, experts, topk),
        "rank": (ep - node) * per_rank,
        "none": topk * (ep - node) / ep,
    }[dedup]
    near = (node - 1) * (topk / ep if dedup == "none" else per_rank)
    if dedup == "node":
        near *= nodes
    times = [
        payload * rows / rate * 1e9
        for rows, rate in ((near, links.intra), (nic_rows, links.inter))
        if rate is not None
    ]
    return max(times) if times else None
