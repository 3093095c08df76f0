"""Lower bounds: the bytes that must cross, over the rate of the link that they cross.

Only payload counts (row plus scales), not metadata: what no library can do without.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from ep_ray.a2a.routing import copies
from ep_ray.backends.base import Dedup


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


@dataclass(frozen=True)
class Crossing:
    """Rows that cross each kind of link: `[R, R]` int64, source x destination, zero diagonal."""

    intra: NDArray[np.int64]
    inter: NDArray[np.int64]


def crossing(
    topk_idx_all: NDArray[np.int64], experts: int, dedup: Dedup, node_size: int
) -> Crossing:
    """The rows of a dispatch that must cross, from the actual routing `[R, T, K]`.

    With one copy per node, a row goes to the rank at its source's position on the other node,
    which hands it on inside that node.
    """
    ranks = len(topk_idx_all)
    rows = copies(topk_idx_all, experts, ranks, dedup)
    node = np.arange(ranks) // node_size
    local = node[:, None] == node[None, :]
    if dedup == "node":
        return _relayed(topk_idx_all, experts, rows, local, node_size)
    intra = np.where(local, rows, 0)
    np.fill_diagonal(intra, 0)
    return Crossing(intra, np.where(local, 0, rows))


def _relayed(
    topk_idx_all: NDArray[np.int64],
    experts: int,
    rows: NDArray[np.int64],
    local: NDArray[np.bool_],
    node_size: int,
) -> Crossing:
    ranks = len(rows)
    per_node = copies(topk_idx_all, experts, ranks // node_size, "node")
    intra, inter = np.zeros_like(rows), np.zeros_like(rows)
    for source in range(ranks):
        for there in range(ranks):
            relay = there - there % node_size + source % node_size
            intra[relay, there] += rows[source, there]
            if relay == there and not local[source, there]:
                inter[source, there] = per_node[source, there // node_size]
    np.fill_diagonal(intra, 0)
    return Crossing(intra, inter)


def bound_ns(rows: Crossing, row_bytes: int, links: Links) -> float | None:
    """Least duration of moving `rows`: the busiest direction of the busiest rank and link.

    The same rows travel back in combine, so that the transposed matrix has the same bound.

    Returns:
        None where nothing can cross (EP1).
    """
    times = [
        _busiest(matrix) * row_bytes / rate * 1e9
        for matrix, rate in ((rows.intra, links.intra), (rows.inter, links.inter))
        if rate is not None
    ]
    return max(times) if times else None


def _busiest(matrix: NDArray[np.int64]) -> int:
    return int(max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max()))


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
