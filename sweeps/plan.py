"""From a checked configuration to its trials. Pure: no clock, no machine, no Ray."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from ep_ray.config.check import (
    arms_of,
    backends_of,
    requests_of,
    router_of,
    transport_of,
)
from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import (
    Arm,
    Backend,
    Config,
    DeviceKind,
    Measure,
    Phase,
    RouterPolicy,
    RoutingKind,
    Transport,
)
from sweeps.trial import A2aTrial, ServingTrial, Trial

_T = TypeVar("_T")


# Keys of an arm and of a load that leave the result as it is, or that count in another form.
_NEUTRAL_ARM = (
    "name", "vllm_port", "api_port", "rpc_port", "startup_timeout_s", "transport", "router",
)  # fmt: skip
_NEUTRAL_LOAD = (
    "shapes", "concurrency", "min_requests", "requests_per_slot", "request_timeout_s",
)  # fmt: skip


@dataclass(frozen=True)
class _Side:
    """The configuration that trials of one arm share, as JSON: all of it, and what is hashed."""

    full: str
    hashed: str

    @classmethod
    def of(cls, full: dict[str, Any], hashed: dict[str, Any] | None = None) -> _Side:
        return cls(_dump(full), _dump(full if hashed is None else hashed))


def plan(config: Config, device: DeviceKind) -> list[Trial]:
    """Lists the trials of an experiment in the order in which they run.

    Repeats are whole blocks, every second one mirrored (A B B A), so that a drift of the
    machine does not favour an arm. Cells that share a communicator or engines are neighbours.

    Args:
        config: A checked experiment.
        device: `cpu` or `cuda`: what backend `auto` means.

    Raises:
        ConfigError: Two backends have the same name once `auto` is known.
    """
    trials: list[Trial] = []
    repeats = range(config.repeats)
    if Measure.a2a in config.measure:
        trials += [trial for r in repeats for trial in _a2a(config, device, r)]
    if Measure.serving in config.measure:
        trials += [trial for r in repeats for trial in _serving(config, device, r)]
    return trials


def _a2a(config: Config, device: DeviceKind, repeat: int) -> Iterator[A2aTrial]:
    workload = _without(config.workload, ("ep", "phases", "routing", "zipf_exponent"))
    masked = device is DeviceKind.cuda and config.cluster.mask_gpus
    shared = {
        "seed": config.seed,
        "device": device.name,
        "mask_gpus": masked,
        "workload": workload,
        "transport": config.transport,
    }
    backends = [
        (name, backend, _Side.of({**shared, "backend": backend}))
        for name, backend in _named_backends(config, device)
    ]
    for ep in config.workload.ep:
        for name, backend, side in _mirrored(backends, repeat):
            for phase_name, phase in config.workload.phases.items():
                for routing in config.workload.routing:
                    yield _a2a_trial(
                        config, name, backend, phase_name, phase, ep, routing, repeat, side
                    )


def _a2a_trial(
    config: Config,
    name: str,
    backend: Backend,
    phase_name: str,
    phase: Phase,
    ep: int,
    routing: RoutingKind,
    repeat: int,
    side: _Side,
) -> A2aTrial:
    cell = f"{phase_name}-t{phase.tokens}-ep{ep}-{routing.name}"
    more: dict[str, Any] = {"iterations": phase.iterations}
    if routing is RoutingKind.zipf:
        more["zipf_exponent"] = config.workload.zipf_exponent
    return A2aTrial(
        **_identity(Measure.a2a, name, cell, repeat, side, more),
        backend=backend,
        transport=config.transport,
        phase=phase_name,
        ep=ep,
        tokens=phase.tokens,
        iterations=phase.iterations,
        routing=routing,
    )


def _serving(config: Config, device: DeviceKind, repeat: int) -> Iterator[ServingTrial]:
    sides = [_ArmSide.of(config, device, arm) for arm in arms_of(config)]
    deployments = list(dict.fromkeys(side.deployment for side in sides))
    for deployment in _mirrored(deployments, repeat):
        together = [side for side in sides if side.deployment == deployment]
        for turn, (shape, concurrency) in enumerate(_cells(config, repeat)):
            for side in _mirrored(together, repeat + turn):
                yield _serving_trial(config, side, shape, concurrency, repeat)


def _cells(config: Config, repeat: int) -> list[tuple[str, int]]:
    """Cells of a block; with repeats in a shuffled order, so that neighbours vary."""
    cells = [(s, c) for s in config.load.shapes for c in config.load.concurrency]
    if config.repeats > 1:
        random.Random(f"{config.seed}/{repeat}").shuffle(cells)
    return cells


@dataclass(frozen=True)
class _ArmSide:
    """An arm with everything that its trials have in common."""

    arm: Arm
    transport: Transport
    router: RouterPolicy
    deployment: str
    side: _Side

    @classmethod
    def of(cls, config: Config, device: DeviceKind, arm: Arm) -> _ArmSide:
        transport, router = transport_of(config, arm), router_of(config, arm)
        shared = {"device": device.name, "model": config.model, "transport": transport}
        engines = _dump({**shared, "arm": _without(arm, ("name", "router", "transport"))})
        own = {**shared, "seed": config.seed, "router": router}
        full = {"arm": arm, "load": _without(config.load, ("shapes", "concurrency"))}
        hashed = {
            "arm": _without(arm, _NEUTRAL_ARM),
            "load": _without(config.load, _NEUTRAL_LOAD),
        }
        deployment = hashlib.sha256(engines.encode()).hexdigest()[:12]
        return cls(arm, transport, router, deployment, _Side.of(own | full, own | hashed))


def _serving_trial(
    config: Config, side: _ArmSide, shape: str, concurrency: int, repeat: int
) -> ServingTrial:
    prompt, completion = map(int, shape.split("/"))
    cell = f"{prompt}-{completion}-c{concurrency}"
    requests = requests_of(config, concurrency)
    return ServingTrial(
        **_identity(
            Measure.serving, side.arm.name, cell, repeat, side.side, {"requests": requests}
        ),
        layout=side.arm,
        deployment=side.deployment,
        transport=side.transport,
        router=side.router,
        shape=shape,
        prompt_tokens=prompt,
        completion_tokens=completion,
        concurrency=concurrency,
        requests=requests,
    )


def _identity(
    measure: Measure, arm: str, cell: str, repeat: int, side: _Side, more: dict[str, Any]
) -> dict[str, Any]:
    place = f'"cell": {json.dumps(cell)}, "more": {json.dumps(more)}}}'
    digest = hashlib.sha256(f'{{"arm": {side.hashed}, {place}'.encode()).hexdigest()
    return {
        # 48 bits: thousands of configurations of one cell stay apart.
        "trial_id": f"{measure.name}.{arm}.{cell}.r{repeat}.{digest[:12]}",
        "measure": measure.name,
        "arm": arm,
        "cell": cell,
        "repeat": repeat,
        "config_hash": digest,
        "config_json": f'{{"arm": {side.full}, {place}',
    }


def _named_backends(config: Config, device: DeviceKind) -> list[tuple[str, Backend]]:
    auto = "nccl" if device is DeviceKind.cuda else "gloo"
    found = [
        (auto if name == "auto" else name, replace(b, name=auto) if b.name == "auto" else b)
        for name, b in backends_of(config)
    ]
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two backends are called `{name}` (backend=auto is {auto} here): call the other "
                f"one differently, as in against.backends={{other: {{name: {name}}}}}"
            )
    return found


def _mirrored(items: list[_T], repeat: int) -> list[_T]:
    return items[::-1] if repeat % 2 else items


def _without(node: Any, keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in asdict(node).items() if key not in keys}


def _dump(node: dict[str, Any]) -> str:
    return json.dumps(node, default=_jsonable, sort_keys=True)


def _jsonable(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else asdict(value)
