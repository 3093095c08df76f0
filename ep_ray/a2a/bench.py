"""One all-to-all trial on one rank: check, warm up, time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ep_ray.a2a import compat, facts, neutral
from ep_ray.a2a.check import blank, check, payload
from ep_ray.a2a.launch import Launch, make_launch
from ep_ray.a2a.links import Fabric, measure_fabric
from ep_ray.a2a.measured import Measured
from ep_ray.a2a.overlap import Work
from ep_ray.a2a.pool import draw_pool, gather, on_device
from ep_ray.a2a.procedure import Procedure, TrialResult
from ep_ray.a2a.routing import Routing
from ep_ray.a2a.stats import concat
from ep_ray.a2a.timing import Timer, make_timer
from ep_ray.backends.base import Backend, Spec, Tokens

FAULTS_SHOWN = 20


def run_trial(
    spec: Spec,
    procedure: Procedure,
    backend: Backend,
    group: ProcessGroup,
    device: torch.device,
    fabric: Fabric | None = None,
    table: NDArray[np.int64] | None = None,
) -> TrialResult:
    """Runs one trial; collective over `group`, whose size is `spec.ep`.

    Args:
        fabric: What an earlier trial on this communicator measured; None measures it.
        table: `[N, K]` choices for `file` routing.

    Raises:
        ValueError: The group has another size than `spec.ep`, or the backend or the routing
            cannot do what `spec` asks.
    """
    require_size(spec, group)
    fabric = fabric or measure_fabric(group, device)
    pool = draw_pool(spec, procedure, dist.get_rank(group), table)
    backend.setup(spec, group, device)
    timer = make_timer(group, device, fabric.shared_clock)
    work = None if procedure.overlap_us is None else Work(procedure.overlap_us, timer, group)
    launch = make_launch(spec, backend, blank(backend, spec, device), pool[0], group, work)
    try:
        result = _run_checked(spec, procedure, backend, launch, timer, pool, fabric)
    finally:
        launch.close()
    # Not in the `finally`: destroying is collective, and after an exception on one rank it would
    # wait for peers that wait for this rank, and hide the exception.
    backend.destroy()
    return result


def require_size(spec: Spec, group: ProcessGroup) -> None:
    """Raises `ValueError` unless the group has as many ranks as `spec` asks for."""
    ranks = dist.get_world_size(group)
    if ranks != spec.ep:
        raise ValueError(f"EP{spec.ep} was asked of a group of {ranks} ranks; they must be equal")


def _run_checked(
    spec: Spec,
    procedure: Procedure,
    backend: Backend,
    launch: Launch,
    timer: Timer,
    pool: list[Routing],
    fabric: Fabric,
) -> TrialResult:
    group, device = timer.group, timer.device
    pool_idx, checked = gather(pool, spec.tokens, group, device)
    faults = []
    if procedure.check:
        faults = check(backend, spec, group, device, pool, launch, checked)
    if faults:
        return TrialResult(timer.rank, concat([]), [], _failure(faults))
    launch.load(pool[0], _tokens(spec, backend, device))
    used = pool[:1] if procedure.compat in compat.FIXED_ROUTING else pool
    routings = on_device(used, device)
    began_unix_ns, began = time.time_ns(), time.perf_counter_ns()
    measured = _time_all(spec, procedure, backend, launch, timer, routings)
    timed_ns = time.perf_counter_ns() - began
    # The same on every rank, and slow beside a trial: once is enough.
    rows: list[dict[str, Any]] = []
    if timer.rank == 0:
        timed_idx = pool_idx[: len(used)]
        rows = facts.operations(spec, procedure, backend, timed_idx, fabric.links, measured)
    return TrialResult(timer.rank, measured.samples(), rows, None, began_unix_ns, timed_ns)


def _failure(faults: list[str]) -> str:
    rest = len(faults) - FAULTS_SHOWN
    more = f"; and {rest} more" if rest > 0 else ""
    return "correctness check failed: " + "; ".join(faults[:FAULTS_SHOWN]) + more


def _time_all(
    spec: Spec,
    procedure: Procedure,
    backend: Backend,
    launch: Launch,
    timer: Timer,
    pool: list[Routing],
) -> Measured:
    # A graph ends where its streams join: what it sends, it has also received.
    split = procedure.split and backend.capabilities.split and not spec.graph
    if procedure.compat is not None:
        return compat.measure(procedure, launch, timer, pool, split, spec.tokens <= 128)
    wanted = neutral.runs(split, launch.overlaps and backend.capabilities.split)
    return neutral.measure(procedure, launch, timer, pool, wanted)


def _tokens(spec: Spec, backend: Backend, device: torch.device) -> Tokens:
    rows = torch.randn(spec.tokens, spec.hidden, generator=torch.Generator().manual_seed(0))
    return payload(backend, spec, rows.to(device))
