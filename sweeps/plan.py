"""From a checked configuration to its trials. Pure: no clock, no machine, no Ray."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeVar

from ep_ray.config.check import (
    arms_of,
    backends_of,
    requests_of,
    router_of,
    transport_of,
)
from ep_ray.config.schema import (
    Arm,
    ArmKind,
    Backend,
    Config,
    DeviceKind,
    Measure,
    Phase,
    RouterPolicy,
    RoutingKind,
    Transport,
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Trial:
    """One measurement: an arm at a cell, once.

    Attributes:
        trial_id: Unique in a sweep and equal in every run of the same configuration.
        measure: `a2a` or `serving`.
        arm: Name of what is compared.
        cell: Name of the workload point.
        repeat: 0-based.
        config_hash: Of everything that can change the result.
        config_json: The same, readable.
    """

    trial_id: str
    measure: str
    arm: str
    cell: str
    repeat: int
    config_hash: str
    config_json: str

    @property
    def block(self) -> str:
        """Neighbours with the same block share actors."""
        return self.measure


@dataclass(frozen=True)
class A2aTrial(Trial):
    """Dispatch and combine of one backend at one workload point."""

    backend: Backend
    transport: Transport
    phase: str
    ep: int
    tokens: int
    iterations: int
    routing: RoutingKind


@dataclass(frozen=True)
class ServingTrial(Trial):
    """One closed-loop cell against one arm.

    Attributes:
        deployment: Equal for arms that differ only in how requests reach the engines; they
            share the engines and take turns cell by cell.
    """

    layout: Arm
    deployment: str
    transport: Transport
    router: RouterPolicy
    shape: str
    prompt_tokens: int
    completion_tokens: int
    concurrency: int
    requests: int

    @property
    def block(self) -> str:
        """Neighbours with the same block share engines."""
        return f"serving/{self.deployment}"

    @property
    def gpus(self) -> int:
        """GPUs that the arm takes; 0 for a server that is already running."""
        return 0 if self.layout.kind is ArmKind.attached else self.layout.tp * self.layout.dp


def plan(config: Config, device: DeviceKind) -> list[Trial]:
    """Lists the trials of an experiment in the order in which they run.

    Repeats are whole blocks, every second one mirrored (A B B A), so that a drift of the
    machine does not favour an arm. Cells that share a communicator or engines are neighbours.

    Args:
        config: A checked experiment.
        device: `cpu` or `cuda`: what backend `auto` means.
    """
    trials: list[Trial] = []
    repeats = range(config.repeats)
    if Measure.a2a in config.measure:
        trials += [trial for repeat in repeats for trial in _a2a(config, device, repeat)]
    if Measure.serving in config.measure:
        trials += [trial for repeat in repeats for trial in _serving(config, repeat)]
    return trials


def _a2a(config: Config, device: DeviceKind, repeat: int) -> Iterator[A2aTrial]:
    common = _plain(config.workload)
    for key in ("ep", "phases", "routing"):
        del common[key]
    shared = {"seed": config.seed, "device": device.name, "workload": common}
    backends = [_named(backend, device) for backend in backends_of(config)]
    for ep in config.workload.ep:
        for backend in _mirrored(backends, repeat):
            arm_json = _dump({**shared, "backend": backend, "transport": config.transport})
            for name, phase in config.workload.phases.items():
                for routing in config.workload.routing:
                    yield _a2a_trial(config, backend, name, phase, ep, routing, repeat, arm_json)


def _a2a_trial(
    config: Config,
    backend: Backend,
    name: str,
    phase: Phase,
    ep: int,
    routing: RoutingKind,
    repeat: int,
    arm_json: str,
) -> A2aTrial:
    cell = f"{name}-t{phase.tokens}-ep{ep}-{routing.name}"
    return A2aTrial(
        **_identity(
            Measure.a2a, backend.name, cell, repeat, arm_json, {"iterations": phase.iterations}
        ),
        backend=backend,
        transport=config.transport,
        phase=name,
        ep=ep,
        tokens=phase.tokens,
        iterations=phase.iterations,
        routing=routing,
    )


def _serving(config: Config, repeat: int) -> Iterator[ServingTrial]:
    shared = _serving_shared(config)
    sides = [_Side.of(config, arm, shared) for arm in arms_of(config)]
    deployments = list(dict.fromkeys(side.deployment for side in sides))
    for deployment in _mirrored(deployments, repeat):
        together = [side for side in sides if side.deployment == deployment]
        for turn, (shape, concurrency) in enumerate(_cells(config, repeat)):
            for side in _mirrored(together, repeat + turn):
                yield _serving_trial(config, side, shape, concurrency, repeat)


def _serving_shared(config: Config) -> dict[str, Any]:
    load = _plain(config.load)
    for key in ("shapes", "concurrency"):
        del load[key]
    return {
        "seed": config.seed,
        "device": config.cluster.device.name,
        "model": config.model,
        "load": load,
    }


def _cells(config: Config, repeat: int) -> list[tuple[str, int]]:
    """Cells of a block; with repeats in a shuffled order, so that neighbours vary."""
    cells = [(s, c) for s in config.load.shapes for c in config.load.concurrency]
    if config.repeats > 1:
        random.Random(f"{config.seed}/{repeat}").shuffle(cells)
    return cells


@dataclass(frozen=True)
class _Side:
    """An arm with everything that its trials have in common."""

    arm: Arm
    transport: Transport
    router: RouterPolicy
    deployment: str
    arm_json: str

    @classmethod
    def of(cls, config: Config, arm: Arm, shared: dict[str, Any]) -> _Side:
        transport, router = transport_of(config, arm), router_of(config, arm)
        engines = {k: v for k, v in _plain(arm).items() if k not in ("name", "router", "transport")}
        deployed = _dump({"engines": engines, "transport": transport, "model": config.model})
        arm_json = _dump({**shared, "arm": arm, "transport": transport, "router": router})
        digest = hashlib.sha256(deployed.encode()).hexdigest()[:8]
        return cls(arm, transport, router, digest, arm_json)


def _serving_trial(
    config: Config, side: _Side, shape: str, concurrency: int, repeat: int
) -> ServingTrial:
    prompt, completion = map(int, shape.split("/"))
    cell = f"{prompt}-{completion}-c{concurrency}"
    return ServingTrial(
        **_identity(Measure.serving, side.arm.name, cell, repeat, side.arm_json, {}),
        layout=side.arm,
        deployment=side.deployment,
        transport=side.transport,
        router=side.router,
        shape=shape,
        prompt_tokens=prompt,
        completion_tokens=completion,
        concurrency=concurrency,
        requests=requests_of(config, concurrency),
    )


def _identity(
    measure: Measure, arm: str, cell: str, repeat: int, arm_json: str, more: dict[str, Any]
) -> dict[str, Any]:
    text = f'{{"arm": {arm_json}, "cell": "{cell}", "more": {json.dumps(more)}}}'
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {
        "trial_id": f"{measure.name}.{arm}.{cell}.r{repeat}.{digest[:8]}",
        "measure": measure.name,
        "arm": arm,
        "cell": cell,
        "repeat": repeat,
        "config_hash": digest,
        "config_json": text,
    }


def _named(backend: Backend, device: DeviceKind) -> Backend:
    if backend.name != "auto":
        return backend
    name = "nccl" if device is DeviceKind.cuda else "gloo"
    return Backend(name=name, options=backend.options)


def _mirrored(items: list[_T], repeat: int) -> list[_T]:
    return items[::-1] if repeat % 2 else items


def _plain(node: Any) -> dict[str, Any]:
    return asdict(node)


def _dump(node: dict[str, Any]) -> str:
    return json.dumps(node, default=_jsonable, sort_keys=True)


def _jsonable(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else asdict(value)
