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
from ep_ray.a2a.routing import Routing, copies, max_over_mean
from ep_ray.backends.base import Backend, Capabilities, Spec

OPS = ("dispatch", "combine", "pair")


def gather_pool(
    pool: list[Routing], group: ProcessGroup, device: torch.device
) -> NDArray[np.int64]:
    """The pool's experts on all ranks, `[P, R, T, K]`; collective."""
    mine = torch.stack([routing.topk_idx for routing in pool]).to(device, torch.int32)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.stack(parts, dim=1).cpu().numpy().astype(np.int64)


def operations(
    spec: Spec,
    backend: Backend,
    pool_idx: NDArray[np.int64],
    links: Links,
    warmups: dict[str, int],
    checked: bool,
) -> list[dict[str, Any]]:
    """One dict per operation, keyed as the `operations` table after its key; pure.

    Iterations go through the pool in turn, so bytes, bound and imbalance are medians over it,
    as the headline duration is a median over iterations.

    Args:
        pool_idx: `[P, R, T, K]`, from `gather_pool`.
        warmups: Warm-up iterations per operation.
    """
    can = backend.capabilities
    varying = _per_routing(spec, backend, pool_idx, links)
    rates = [rate for rate in (links.intra, links.inter) if rate is not None]
    return [
        {
            "op": op,
            "dedup": can.dedup,
            "layout": can.layout,
            "timed_region": timed_region(can, op),
            "graph": False,
            "warmup_iterations": warmups[op],
            **varying[op],
            "link_bytes_per_s": min(rates, default=None),
            "checked": checked,
        }
        for op in OPS
    ]


def timed_region(can: Capabilities, op: str) -> str:
    """What is inside the clock, in words."""
    regions = {"dispatch": can.dispatch_region, "combine": can.combine_region}
    return regions.get(op, f"{can.dispatch_region}; then {can.combine_region}; no experts between")


def _per_routing(
    spec: Spec, backend: Backend, pool_idx: NDArray[np.int64], links: Links
) -> dict[str, dict[str, Any]]:
    columns: dict[str, list[dict[str, Any]]] = {op: [] for op in OPS}
    for topk_idx in pool_idx:
        bounds = _bounds(spec, backend.capabilities, topk_idx, links)
        wire = backend.wire_bytes(topk_idx)
        matrices = {"dispatch": [wire.dispatch], "combine": [wire.combine]}
        matrices["pair"] = matrices["dispatch"] + matrices["combine"]
        arriving = copies(topk_idx, spec.experts, spec.ep, backend.capabilities.row_dedup)
        imbalance = max_over_mean(arriving)
        for op in OPS:
            row = _bytes(matrices[op]) | {"bound_ns": bounds[op]}
            columns[op].append(row | {"max_over_mean_received_rows": imbalance})
    return {op: _medians(rows) for op, rows in columns.items()}


def _bounds(
    spec: Spec, can: Capabilities, topk_idx: NDArray[np.int64], links: Links
) -> dict[str, float | None]:
    rows = crossing(topk_idx, spec.experts, can.dedup, links.node_size)
    dispatch = bound_ns(rows, spec.dispatch_row_bytes, links)
    combine = bound_ns(rows, spec.combine_row_bytes, links)
    both = None if dispatch is None or combine is None else dispatch + combine
    return {"dispatch": dispatch, "combine": combine, "pair": both}


def _bytes(matrices: Iterable[NDArray[np.int64]]) -> dict[str, int]:
    total: NDArray[np.int64] = sum(matrices, start=np.zeros((), np.int64))
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
