"""Places ranks: one atomic placement group whose bundles are TP groups, and a stable order."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ep_ray.address import service_ip
from ep_ray.watchdog import TrialError, wait_all


class PlacementError(TrialError):
    """The cluster cannot hold the ranks: what was asked, what there is."""

    def __init__(self, reason: str) -> None:
        super().__init__("timeout", reason)


@dataclass(frozen=True)
class Slot:
    """Where an actor sits; sorts by node and device, so that equal runs rank equally.

    Attributes:
        node_ip: The node's address.
        node_id: Ray's id of the node.
        gpu_ids: GPUs of the bundle as `CUDA_VISIBLE_DEVICES` names them.
        gpu_indices: The same as device indices in a process that sees all the node's GPUs.
        bundle: Index in the placement group.
    """

    node_ip: str
    node_id: str
    gpu_ids: tuple[str, ...]
    gpu_indices: tuple[int, ...]
    bundle: int


def reserve(
    bundles: Sequence[dict[str, float]], name: str, timeout_s: float, strategy: str = "PACK"
) -> PlacementGroup:
    """Reserves all bundles at once or none.

    Args:
        bundles: Resources of each TP group; a bundle never spans nodes.
        name: Name shown in the Ray dashboard.
        timeout_s: Deadline.
        strategy: Ray's placement strategy.

    Raises:
        PlacementError: Not placed before the deadline.
    """
    group = placement_group(list(bundles), strategy=strategy, name=name)
    ready, _ = ray.wait([group.ready()], timeout=timeout_s)
    if ready:
        return group
    state = placement_group_table(group).get("stats", {}).get("scheduling_state", "unknown")
    remove_placement_group(group)
    raise PlacementError(
        f"placement of {name} did not come within {timeout_s:.0f} s (state {state}): asked for "
        f"{len(bundles)} bundles of {bundles[0]}; free are {_free(bundles)}. "
        "Stop what holds the resources, or ask for fewer ranks"
    )


def _free(bundles: Sequence[dict[str, float]]) -> dict[str, float]:
    free = ray.available_resources()
    return {name: free.get(name, 0.0) for name in bundles[0]}


def release(group: PlacementGroup | None) -> None:
    """Gives a placement group back."""
    if group is not None:
        remove_placement_group(group)


def in_bundle(group: PlacementGroup, index: int, gpus: float, cpus: float = 1) -> dict[str, Any]:
    """Actor options that put an actor into a bundle."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return {"scheduling_strategy": strategy, "num_gpus": gpus, "num_cpus": cpus}


def find_slots(
    group: PlacementGroup,
    bundles: int,
    gpus: float,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> list[Slot]:
    """Where the bundles of a group are, in rank order.

    Args:
        group: A placed group.
        bundles: How many bundles it has.
        gpus: GPUs of each bundle, a fraction where ranks share one; 0 on the CPU.
        timeout_s: Deadline.
        env: Variables of the ranks that bear on which GPUs they see.

    Raises:
        TrialError: A node did not answer.
    """
    more = {"runtime_env": {"env_vars": dict(env)}} if env else {}
    refs = [
        _slot.options(**in_bundle(group, index, gpus), **more, name=f"slot:{index}").remote(index)
        for index in range(bundles)
    ]
    found: list[Slot] = wait_all(refs, timeout_s, "finding the placed nodes")
    return [found[i] for i in rank_order(found)]


@ray.remote
def _slot(bundle: int) -> Slot:
    context = ray.get_runtime_context()
    ids = tuple(str(i) for i in context.get_accelerator_ids().get("GPU", []))
    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    # Ray names several GPUs of a bundle in no stable order.
    pairs = sorted((visible.index(i) if i in visible else int(i), i) for i in ids)
    indices, names = tuple(index for index, _ in pairs), tuple(name for _, name in pairs)
    return Slot(service_ip(), context.get_node_id(), names, indices, bundle)


def rank_order(slots: Sequence[Slot]) -> list[int]:
    """Indices of `slots` in rank order: by node, then by device.

    Ray's bundle order differs between identical runs (ray#51117). With masked GPUs every slot
    has index 0, and the ids tell the devices apart.
    """
    return sorted(range(len(slots)), key=lambda i: _slot_key(slots[i]))


def _slot_key(slot: Slot) -> tuple[Any, ...]:
    ids = [(int(i), "") if i.isdigit() else (-1, i) for i in slot.gpu_ids]
    return _ip_key(slot), slot.gpu_indices, ids, slot.bundle


def _ip_key(slot: Slot) -> tuple[tuple[int, ...], str]:
    # Several fake nodes of one machine share an address: the node id keeps them apart.
    parts = slot.node_ip.split(".")
    numeric = tuple(int(p) for p in parts) if all(p.isdigit() for p in parts) else ()
    return numeric, slot.node_id
