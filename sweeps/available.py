"""Which backends of a plan this hardware and software can run, found before anything starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from ep_ray.backends import registry
from ep_ray.config.schema import Backend, DeviceKind
from ep_ray.session import Node, on_node
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
        return _probe_all(arms)
    hosts = [n for n in nodes if n.machine.gpus or device is DeviceKind.cpu]
    refs = [on_node(_probe_all, node.node_id).remote(arms) for node in hosts]
    found: list[Reasons] = wait_all(refs, _PROBE_S, "probing the backends on the nodes")
    names = [node.machine.hostname for node in hosts]
    return {
        arm: merged([(name, of[arm]) for name, of in zip(names, found, strict=True)])
        for arm in arms
    }


def probe(backend: Backend, env: Mapping[str, str]) -> list[str]:
    """Why a backend cannot run in this process with `env` added; a failing probe is a reason."""
    try:
        return registry.load(backend.name, backend.options).probe(os.environ | dict(env))
    except ValueError as error:
        return [str(error)]
    except Exception as error:  # a library that breaks on import must not end the sweep
        return [f"its adapter fails: {type(error).__name__}: {error}"]


def merged(found: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Reasons of several hosts, each once; with its hosts where not all have it.

    Args:
        found: Host and its reasons.
    """
    where: dict[str, list[str]] = {}
    for host, reasons in found:
        for reason in reasons:
            where.setdefault(reason, []).append(host)
    return [
        reason if len(hosts) == len(found) else f"{', '.join(hosts)}: {reason}"
        for reason, hosts in where.items()
    ]


def _probe_all(arms: Mapping[str, tuple[Backend, Mapping[str, str]]]) -> Reasons:
    return {arm: probe(*asked) for arm, asked in arms.items()}
