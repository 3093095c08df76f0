"""What stands beside every timing: bytes, bound and imbalance of the routing that was timed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ep_ray.a2a.bounds import Links, bound_ns, crossing
from ep_ray.a2a.measured import Measured
from ep_ray.a2a.procedure import Procedure
from ep_ray.a2a.routing import copies, max_over_mean
from ep_ray.a2a.statistic import statistic
from ep_ray.backends.base import Backend, Capabilities, Spec

_EXCHANGES = {
    "dispatch": ("dispatch",),
    "combine": ("combine",),
    "pair": ("dispatch", "combine"),
    "pair_overlapped": ("dispatch", "combine"),
}
"""The exchanges that happen wholly within an operation; others have no bytes of their own."""


def operations(
    spec: Spec,
    procedure: Procedure,
    backend: Backend,
    pool_idx: NDArray[np.int64],
    links: Links,
    measured: Measured,
) -> list[dict[str, Any]]:
    """One dict per operation, keyed as the `operations` table after its key; pure.

    Iterations go through the pool in turn, so bytes, bound and imbalance are medians over it,
    as the headline duration is a median over iterations.

    Args:
        pool_idx: `[P, R, T, K]`, from `pool.gather`: the routings that were timed.
    """
    can = backend.capabilities
    varying = _per_routing(spec, backend, pool_idx, links, measured.warmups)
    rates = [rate for rate in (links.intra, links.inter) if rate is not None]
    return [
        {
            "op": op,
            "dedup": can.dedup,
            "layout": can.layout,
            "timed_region": timed_region(can, op),
            "graph": spec.graph,
            "warmup_iterations": warmup,
            **varying[op],
            "link_bytes_per_s": min(rates, default=None),
            "checked": procedure.check,
            "statistic": statistic(procedure.compat).words,
            "loop": measured.loop,
        }
        for op, warmup in measured.warmups.items()
    ]


def timed_region(can: Capabilities, op: str) -> str:
    """What is inside the clock, in words."""
    both = f"{can.dispatch_region}; then {can.combine_region}"
    regions = {
        "dispatch": can.dispatch_region,
        "combine": can.combine_region,
        "pair": f"{both}; no experts between",
        "pair_overlapped": f"{both}; a matmul between send and receive of each",
        "work": "the matmuls of pair_overlapped, alone",
    }
    whole, _, part = op.partition("_")
    words = {"send": "up to the launch of the exchange", "recv": "from there to the end"}
    return regions[op] if op in regions else f"{regions[whole]}: {words[part]}"


def _per_routing(
    spec: Spec,
    backend: Backend,
    pool_idx: NDArray[np.int64],
    links: Links,
    ops: Iterable[str],
) -> dict[str, dict[str, Any]]:
    can = backend.capabilities
    wire, bounds, imbalances = [], [], []
    for topk_idx in pool_idx:  # all three count the same rows, which is done once
        wire.append(backend.wire_bytes(topk_idx))
        bounds.append(_bounds(spec, can, topk_idx, links))
        arriving = copies(topk_idx, spec.experts, spec.ep, can.row_dedup)
        imbalances.append(max_over_mean(arriving))
    matrices = {
        "dispatch": np.stack([each.dispatch for each in wire]),
        "combine": np.stack([each.combine for each in wire]),
    }
    imbalance = float(np.median(imbalances))
    found = {}
    for op in ops:
        names = _EXCHANGES.get(op, ())
        found[op] = {
            **_bytes([matrices[name] for name in names]),
            "bound_ns": _median_of_sums([[of[name] for name in names] for of in bounds]),
            "max_over_mean_received_rows": imbalance,
        }
    return found


def _bounds(
    spec: Spec, can: Capabilities, topk_idx: NDArray[np.int64], links: Links
) -> dict[str, float | None]:
    rows = crossing(topk_idx, spec.experts, can.dedup, links.node_size)
    return {
        "dispatch": bound_ns(rows, spec.dispatch_row_bytes, links),
        "combine": bound_ns(rows, spec.combine_row_bytes, links),
    }


def _median_of_sums(bounds: list[list[float | None]]) -> float | None:
    """None for an operation without exchanges, and where an exchange has no bound."""
    known = [[bound for bound in row if bound is not None] for row in bounds]
    if not known[0] or len(known[0]) < len(bounds[0]):
        return None
    return float(np.median([sum(row) for row in known]))


def _bytes(matrices: list[NDArray[np.int64]]) -> dict[str, Any]:
    """Medians over the pool, of the sum of `[P, R, R]` source x destination bytes."""
    if not matrices:
        return dict.fromkeys(("wire_bytes_out_max", "wire_bytes_in_max", "wire_bytes_total"))
    total = np.sum(matrices, axis=0)
    per_routing = {
        "wire_bytes_out_max": total.sum(axis=2).max(axis=1),
        "wire_bytes_in_max": total.sum(axis=1).max(axis=1),
        "wire_bytes_total": total.sum(axis=(1, 2)),
    }
    return {key: round(float(np.median(values))) for key, values in per_routing.items()}
