"""What stands beside every timing: bytes, bound and imbalance of the routing that was timed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ep_ray.a2a.bounds import Links, bound_ns, crossing
from ep_ray.a2a.measured import Measured
from ep_ray.a2a.pool import full_length
from ep_ray.a2a.procedure import Procedure
from ep_ray.a2a.routing import Routing, copies, max_over_mean
from ep_ray.a2a.statistic import statistic
from ep_ray.backends.base import Backend, Capabilities, Spec

_EXCHANGES = {
    "dispatch": ("dispatch",),
    "combine": ("combine",),
    "pair": ("dispatch", "combine"),
    "pair_overlapped": ("dispatch", "combine"),
}
"""The exchanges that happen wholly within an operation; others have no bytes of their own."""


def gather_pool(
    pool: list[Routing], tokens: int, group: ProcessGroup, device: torch.device
) -> NDArray[np.int64]:
    """The pool's experts on all ranks, `[P, R, T, K]`; collective."""
    full = [full_length(routing, tokens).topk_idx for routing in pool]
    mine = torch.stack(full).to(device, torch.int32)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.stack(parts, dim=1).cpu().numpy().astype(np.int64)


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
        pool_idx: `[P, R, T, K]`, from `gather_pool`: the routings that were timed.
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
    # Operations of the same exchanges share everything that depends on the routing.
    exchanges = {op: _EXCHANGES.get(op, ()) for op in ops}
    columns: dict[tuple[str, ...], list[dict[str, Any]]] = {of: [] for of in exchanges.values()}
    for topk_idx in pool_idx:
        bounds = _bounds(spec, backend.capabilities, topk_idx, links)
        wire = backend.wire_bytes(topk_idx)
        matrices = {"dispatch": wire.dispatch, "combine": wire.combine}
        arriving = copies(topk_idx, spec.experts, spec.ep, backend.capabilities.row_dedup)
        imbalance = max_over_mean(arriving)
        for names, rows in columns.items():
            row = _bytes([matrices[name] for name in names])
            row["bound_ns"] = _sum([bounds[name] for name in names])
            rows.append(row | {"max_over_mean_received_rows": imbalance})
    medians = {names: _medians(rows) for names, rows in columns.items()}
    return {op: medians[names] for op, names in exchanges.items()}


def _bounds(
    spec: Spec, can: Capabilities, topk_idx: NDArray[np.int64], links: Links
) -> dict[str, float | None]:
    rows = crossing(topk_idx, spec.experts, can.dedup, links.node_size)
    return {
        "dispatch": bound_ns(rows, spec.dispatch_row_bytes, links),
        "combine": bound_ns(rows, spec.combine_row_bytes, links),
    }


def _sum(bounds: list[float | None]) -> float | None:
    known = [bound for bound in bounds if bound is not None]
    return sum(known) if known and len(known) == len(bounds) else None


def _bytes(matrices: list[NDArray[np.int64]]) -> dict[str, Any]:
    if not matrices:
        return dict.fromkeys(("wire_bytes_out_max", "wire_bytes_in_max", "wire_bytes_total"))
    total = np.sum(matrices, axis=0)
    return {
        "wire_bytes_out_max": int(total.sum(axis=1).max()),
        "wire_bytes_in_max": int(total.sum(axis=0).max()),
        "wire_bytes_total": int(total.sum()),
    }


def _medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: _median([row[key] for row in rows], key) for key in rows[0]}


def _median(values: list[Any], key: str) -> float | int | None:
    if values[0] is None:
        return None
    middle = float(np.median(values))
    return round(middle) if key.startswith("wire_bytes") else middle
