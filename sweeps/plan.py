"""From a checked configuration to its trials. Pure: no clock, no machine, no Ray."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ep_ray.config.check import arms_of, requests_at, requests_of, router_of, transport_of
from ep_ray.config.check_load import lengths_of
from ep_ray.config.schema import (
    Arm,
    ArrivalKind,
    Config,
    DeviceKind,
    Load,
    Measure,
    RouterPolicy,
    Transport,
)
from sweeps.plan_a2a import a2a_trials
from sweeps.trial import LoadPoint, ServingTrial, Side, Trial, dump, identity, mirrored, without

# Keys of an arm and of a load that leave the result as it is, or that count in another form.
_NEUTRAL_ARM = (
    "name", "vllm_port", "api_port", "rpc_port", "startup_timeout_s", "transport", "router",
)  # fmt: skip
_NEUTRAL_LOAD = (
    "shapes", "concurrency", "rate", "min_requests", "requests_per_slot", "duration_s",
    "request_timeout_s",
)  # fmt: skip


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
        trials += [trial for r in repeats for trial in a2a_trials(config, device, r)]
    if Measure.serving in config.measure:
        trials += [trial for r in repeats for trial in _serving(config, device, r)]
    return trials


def _serving(config: Config, device: DeviceKind, repeat: int) -> Iterator[ServingTrial]:
    sides = [_ArmSide.of(config, device, arm) for arm in arms_of(config)]
    deployments = list(dict.fromkeys(side.deployment for side in sides))
    for deployment in mirrored(deployments, repeat):
        together = [side for side in sides if side.deployment == deployment]
        for turn, (shape, point) in enumerate(_cells(config, repeat)):
            for side in mirrored(together, repeat + turn):
                yield _serving_trial(config, side, shape, point, repeat)


def _cells(config: Config, repeat: int) -> list[tuple[str, LoadPoint]]:
    """Cells of a block; with repeats in a shuffled order, so that neighbours vary."""
    cells = [(shape, p) for shape in config.load.shapes for p in load_points(config)]
    if config.repeats > 1:
        random.Random(f"{config.seed}/{repeat}").shuffle(cells)
    return cells


def load_points(config: Config) -> list[LoadPoint]:
    """What is asked of the load at each shape, in order."""
    load = config.load
    if load.arrival is ArrivalKind.closed:
        return [LoadPoint(c, None, requests_of(config, c)) for c in load.concurrency]
    return [LoadPoint(0, rate, requests_at(config, rate)) for rate in load.rate]


@dataclass(frozen=True)
class _ArmSide:
    """An arm with everything that its trials have in common."""

    arm: Arm
    transport: Transport
    router: RouterPolicy
    router_processes: int | None
    deployment: str
    side: Side

    @classmethod
    def of(cls, config: Config, device: DeviceKind, arm: Arm) -> _ArmSide:
        transport, router = transport_of(config, arm), router_of(config, arm)
        shared: dict[str, Any] = {"device": device.name, "model": config.model}
        shared |= {"transport": transport, "ranks_per_gpu": config.cluster.ranks_per_gpu}
        engines = dump({**shared, "arm": without(arm, ("name", "router", "transport"))})
        own = {**shared, "seed": config.seed, "router": router}
        processes = config.router.processes
        if processes > 1 and router is not RouterPolicy.none:  # one is what trials always had
            own["router_processes"] = processes  # vllm_router keeps to as many cores
        full = {"arm": arm, "load": without(config.load, ("shapes", "concurrency", "rate"))}
        hashed = {
            "arm": without(arm, _NEUTRAL_ARM),
            "load": without(config.load, _neutral(config.load)),
        }
        deployment = hashlib.sha256(engines.encode()).hexdigest()[:12]
        side = Side.of(own | full, own | hashed)
        ours = router not in (RouterPolicy.none, RouterPolicy.vllm_router)
        counted = processes if ours else None
        return cls(arm, transport, router, counted, deployment, side)


def _neutral(load: Load) -> tuple[str, ...]:
    """Keys that are not hashed; one client is what sweeps had before there could be more."""
    return _NEUTRAL_LOAD if load.clients > 1 else (*_NEUTRAL_LOAD, "clients")


def _serving_trial(
    config: Config, side: _ArmSide, shape: str, point: LoadPoint, repeat: int
) -> ServingTrial:
    prompt, completion = lengths_of(shape)
    cell = f"{shape.replace('/', '-')}-{point.name}"
    more: dict[str, Any] = {"requests": point.requests}
    if point.rate_per_s is not None:
        more["rate_per_s"] = point.rate_per_s
    return ServingTrial(
        **identity(Measure.serving, side.arm.name, cell, repeat, side.side, more),
        layout=side.arm,
        deployment=side.deployment,
        transport=side.transport,
        router=side.router,
        shape=shape,
        prompt_tokens=prompt,
        completion_tokens=completion,
        concurrency=point.concurrency,
        requests=point.requests,
        arrival=config.load.arrival,
        rate_per_s=point.rate_per_s,
        router_processes=side.router_processes,
    )
