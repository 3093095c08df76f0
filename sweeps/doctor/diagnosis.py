"""From examined nodes to what can be measured on them: measures and shipped experiments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError
from ep_ray.config.folder import config_dir
from ep_ray.config.schema import DeviceKind
from sweeps.available import Reasons
from sweeps.doctor.findings import BROKEN, Finding, findings
from sweeps.doctor.node import Node
from sweeps.feasible import check_feasible, resolve_device
from sweeps.plan import plan
from sweeps.trial import A2aTrial, Trial

CPU_BACKENDS = ("gloo",)


@dataclass(frozen=True)
class Ability:
    """Something that can be measured here, or why it cannot.

    Attributes:
        name: A measure and its device, or an experiment.
        can: Whether it can run.
        why: With what it would run, or what it lacks.
    """

    name: str
    can: bool
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """All that the doctor has to say."""

    nodes: list[Node]
    measures: list[Ability]
    experiments: list[Ability]
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """At least one measure can run and nothing is broken."""
        return any(m.can for m in self.measures) and not any(
            f.level == BROKEN for f in self.findings
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"healthy": self.healthy, **asdict(self)}


def diagnose(nodes: Sequence[Node]) -> Diagnosis:
    """Judges the nodes; composes and plans every shipped experiment, and starts none."""
    return Diagnosis(list(nodes), measures(nodes), experiments(nodes), findings(nodes))


def measures(nodes: Sequence[Node]) -> list[Ability]:
    """All-to-all and serving, on the CPU and on GPUs."""
    with_gpus = [node for node in nodes if node.machine.gpus]
    on_gpus = [name for name in nodes[0].backends if name not in CPU_BACKENDS]
    return [
        _a2a("all-to-all on the CPU", nodes, CPU_BACKENDS),
        _a2a("all-to-all on GPUs", with_gpus, on_gpus),
        _serving("serving on the CPU", nodes, "cpu"),
        _serving("serving on GPUs", with_gpus, "cuda"),
    ]


def _a2a(name: str, nodes: Sequence[Node], backends: Sequence[str]) -> Ability:
    if not nodes:
        return Ability(name, False, "no GPU")
    usable = [b for b in backends if not any(node.backends[b] for node in nodes)]
    if usable:
        return Ability(name, True, f"backends {', '.join(usable)}")
    return Ability(name, False, "no backend can run; see the backends")


def _serving(name: str, nodes: Sequence[Node], build: str) -> Ability:
    if not nodes:
        return Ability(name, False, "no GPU")
    found = {node.vllm for node in nodes}
    if found == {build}:
        return Ability(name, True, f"vLLM's {build} build")
    words = ", ".join(sorted(f"the {b} build of vLLM" if b else "no vLLM" for b in found))
    return Ability(name, False, f"needs vLLM's {build} build; found {words}")


def experiments(nodes: Sequence[Node]) -> list[Ability]:
    """Every file of `conf/exp`, as it is shipped; those that can run first."""
    names = sorted(path.stem for path in (config_dir() / "exp").glob("*.yaml"))
    return sorted((_experiment(name, nodes) for name in names), key=lambda found: not found.can)


def _experiment(name: str, nodes: Sequence[Node]) -> Ability:
    machines = [node.machine for node in nodes]
    devices: set[DeviceKind] = set()
    count = 0
    try:
        for point in compose_all([f"+exp={name}"], multirun=False):
            device = resolve_device(point, machines)
            trials = plan(point, device)
            check_feasible(point, trials, device, machines, _backends(trials, nodes))
            devices.add(device)
            count += len(trials)
    except (ConfigError, ValueError) as error:
        return Ability(name, False, _reasons(str(error)))
    words = " and ".join(sorted(device.name for device in devices))
    return Ability(name, True, f"{count} trials on {words}")


def _backends(trials: Sequence[Trial], nodes: Sequence[Node]) -> Reasons:
    """What the nodes said of each arm's backend, every reason once."""
    arms = {t.arm: t.backend.name for t in trials if isinstance(t, A2aTrial)}
    return {
        arm: list(dict.fromkeys(reason for node in nodes for reason in node.backends.get(name, ())))
        for arm, name in arms.items()
    }


def _reasons(text: str) -> str:
    """What was asked and found, by reason; the advice that follows it is for a single command."""
    lines = [line.partition(". ")[0] for line in text.splitlines() if not line.startswith("  ")]
    return "\n".join(dict.fromkeys(lines))
