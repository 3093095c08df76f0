"""The all-to-all part of a plan: cells are phases x EP sizes x routings x launches. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ep_ray.config.check_workload import arm_name, backends_of
from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import Backend, Config, DeviceKind, LaunchKind, Measure, RoutingKind
from sweeps.trial import A2aTrial, Side, identity, mirrored, without


def a2a_trials(config: Config, device: DeviceKind, repeat: int) -> Iterator[A2aTrial]:
    """The trials of one repeat, in order.

    Raises:
        ConfigError: Two backends have the same name once `auto` is known.
    """
    workload = without(config.workload, ("ep", "phases", "routing", "launch", "zipf_exponent"))
    masked = device is DeviceKind.cuda and config.cluster.mask_gpus
    shared = {
        "seed": config.seed,
        "device": device.name,
        "mask_gpus": masked,
        "ranks_per_gpu": config.cluster.ranks_per_gpu,
        "workload": workload,
        "transport": config.transport,
    }
    backends = [
        (name, backend, Side.of({**shared, "backend": backend}))
        for name, backend in _named_backends(config, device)
    ]
    work = config.workload
    points = list(product(work.phases, work.routing, work.launch))
    for ep in work.ep:
        for name, backend, side in mirrored(backends, repeat):
            for phase, routing, launch in points:
                cell = Cell(phase, ep, routing, launch)
                yield _a2a_trial(config, name, backend, cell, repeat, side)


@dataclass(frozen=True)
class Cell:
    """A workload point: a phase by name, and what cells expand over."""

    phase: str
    ep: int
    routing: RoutingKind
    launch: LaunchKind


def _a2a_trial(
    config: Config, name: str, backend: Backend, cell: Cell, repeat: int, side: Side
) -> A2aTrial:
    phase = config.workload.phases[cell.phase]
    more: dict[str, Any] = {"iterations": phase.iterations}
    if cell.routing is RoutingKind.zipf:
        more["zipf_exponent"] = config.workload.zipf_exponent
    return A2aTrial(
        **identity(Measure.a2a, name, _cell_name(config, cell), repeat, side, more),
        backend=backend,
        transport=config.transport,
        phase=cell.phase,
        ep=cell.ep,
        tokens=phase.tokens,
        iterations=phase.iterations,
        routing=cell.routing,
        launch=cell.launch,
        compat=config.workload.compat,
    )


def _cell_name(config: Config, cell: Cell) -> str:
    """Only what differs from the usual is said after the routing."""
    work = config.workload
    tokens = work.phases[cell.phase].tokens
    parts = [cell.phase, f"t{tokens}", f"ep{cell.ep}", cell.routing.name]
    if work.masked_share:
        parts.append(f"masked{work.masked_share:g}")
    if work.tokens_per_rank != "uniform":
        parts.append("ragged" if work.tokens_per_rank == "ragged" else "listed")
    if work.local_tp > 1:
        parts.append(f"tp{work.local_tp}")
    if cell.launch is LaunchKind.graph:
        parts.append(cell.launch.name)
    if work.compat is not None:
        parts.append(work.compat.name)
    return "-".join(parts)


def _named_backends(config: Config, device: DeviceKind) -> list[tuple[str, Backend]]:
    auto = "nccl" if device is DeviceKind.cuda else "gloo"
    found = []
    for name, backend in backends_of(config):
        known = replace(backend, name=auto) if backend.name == "auto" else backend
        found.append((arm_name(known) if name == arm_name(backend) else name, known))
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two backends are called `{name}` (backend=auto is {auto} here): call the other "
                f"one differently, as in against.backends={{other: {{name: {name}}}}}"
            )
    return found
