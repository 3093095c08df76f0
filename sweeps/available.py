"""Which backends of a plan this hardware and software can run, found before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ep_ray.backends import registry
from ep_ray.config.schema import Backend, DeviceKind
from ep_ray.session import NOSET, Node
from ep_ray.watchdog import wait_all
from sweeps.trial import A2aTrial, Trial

_PROBE_S = 120.0

Reasons = Mapping[str, Sequence[str]]
"""Why a backend cannot run, by arm; empty for one that can."""


def backend_reasons(trials: Iterable[Trial], device: DeviceKind, nodes: Sequence[Node]) -> Reasons:
    """Probes every backend of a plan, with the environment that its ranks will have.

    Args:
        trials: The plan; arms of one name have one backend.
        device: What ranks run on.
        nodes: Nodes of a running cluster, whose ranks will not run here; else empty.

    Raises:
        TrialError: A node did not answer.
    """
    arms = {t.arm: (t.backend, t.transport.env) for t in trials if isinstance(t, A2aTrial)}
    if not nodes:
        return {arm: probe(*asked) for arm, asked in arms.items()}
    hosts = [n for n in nodes if n.machine.gpus or device is DeviceKind.cpu]
    refs = [_on_node(node).remote(arms) for node in hosts]
    found: list[Reasons] = wait_all(refs, _PROBE_S, "probing the backends on the nodes")
    return {arm: _of_all(arm, hosts, found) for arm in arms}


def probe(backend: Backend, env: Mapping[str, str]) -> list[str]:
    """Why a backend cannot run in this process with `env` added; a failing probe is a reason."""
    try:
        return registry.load(backend.name, backend.options).probe(os.environ | dict(env))
    except ValueError as error:
        return [str(error)]
    except Exception as error:  # a library that breaks on import must not end the sweep
        return [f"its adapter fails: {type(error).__name__}: {error}"]


def _of_all(arm: str, nodes: Sequence[Node], found: Sequence[Reasons]) -> list[str]:
    """Reasons of all nodes, each with the nodes that have it."""
    where: dict[str, list[str]] = {}
    for node, reasons in zip(nodes, found, strict=True):
        for reason in reasons[arm]:
            where.setdefault(reason, []).append(node.machine.hostname)
    everywhere = len(nodes)
    return [
        reason if len(hosts) == everywhere else f"{reason} (on {', '.join(hosts)})"
        for reason, hosts in where.items()
    ]


def _probe_all(arms: Mapping[str, tuple[Backend, Mapping[str, str]]]) -> Reasons:
    return {arm: probe(*asked) for arm, asked in arms.items()}


def _on_node(node: Node) -> Any:
    pin = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    # A task without GPUs would see none: the environment keeps Ray from hiding them.
    env = {NOSET: "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return ray.remote(_probe_all).options(
        num_cpus=0, max_retries=0, scheduling_strategy=pin, runtime_env={"env_vars": env}
    )
