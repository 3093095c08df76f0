"""Lower bounds: the bytes that must cross, over the rate of the link that they cross.

Only payload counts (row plus scales), not metadata: what no library can do without.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ep_ray.a2a.expected import Links as Links
from ep_ray.a2a.expected import chance as chance
from ep_ray.a2a.expected import expected_bound_ns as expected_bound_ns
from ep_ray.a2a.routing import copies
from ep_ray.a2a.rows import Dedup


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
