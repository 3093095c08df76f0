"""What an arm of a serving sweep was set up as, read from its trials' configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.admission import admitted
from sweeps.results import Trial, labels

NO_ROUTER = "none"


@dataclass(frozen=True)
class ArmFacts:
    """One arm as its configuration has it; None where that does not say.

    Attributes:
        kind: Layout (`wide_tp`, `external_dp`, ...).
        tp: Tensor-parallel size of each engine.
        dp: Data-parallel ranks.
        ep: Ranks that the experts are spread over; 1 where they are not.
        transport: Transport that was asked for.
        router: Policy of its router, `vllm_router` or `none`.
        batch: Requests that its engines admit at once.
        all2all: vLLM's backend for the experts; empty where they are not spread.
        engine: Further settings that change what is measured, in words.
    """

    kind: str
    tp: int | None
    dp: int | None
    ep: int
    transport: str
    router: str | None
    batch: int | None
    all2all: str
    engine: str

    @property
    def layout(self) -> str:
        """`external_dp TP 2 x DP 4, EP 8`."""
        ep = f", EP {self.ep}" if self.ep > 1 else ""
        return f"{self.kind} TP {self.tp} x DP {self.dp}{ep}"


def config_of(trial: Trial) -> dict[str, Any]:
    """Arm, load, model, device and router of a serving trial; empty where it was not recorded."""
    found: dict[str, Any] = json.loads(trial.config_json or "{}")
    return found.get("arm") or {}


def arm_facts(found: Sequence[Trial]) -> dict[str, ArmFacts]:
    """Facts by arm label, in the order of the trials; arms of unknown set-up are left out."""
    first = {label: next(t for t in found if t.label == label) for label in labels(found)}
    return {
        label: _facts(trial, config["arm"])
        for label, trial in first.items()
        if (config := config_of(trial)).get("arm") and config["arm"].get("kind") != "attached"
    }


def _facts(trial: Trial, arm: dict[str, Any]) -> ArmFacts:
    settings = (
        "eager" if arm.get("enforce_eager") else "",
        " ".join(arm.get("extra_args") or []),
        " ".join(f"{name}={value}" for name, value in (arm.get("env") or {}).items()),
    )
    return ArmFacts(
        kind=str(arm.get("kind")),
        tp=trial.tp,
        dp=trial.dp,
        ep=trial.ep or 1,
        transport=trial.transport_asked or "auto",
        router=_router(trial),
        batch=admitted(trial),
        all2all=str(arm.get("all2all_backend") or "") if (trial.ep or 1) > 1 else "",
        engine=", ".join(filter(None, settings)),
    )


def _router(trial: Trial) -> str | None:
    policy = trial.router or config_of(trial).get("router")
    several = (trial.router_processes or 1) > 1
    return f"{policy} in {trial.router_processes} processes" if policy and several else policy
