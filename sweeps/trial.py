"""What a trial is: one measurement of an arm at a cell, once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ep_ray.config.schema import Arm, ArmKind, Backend, RouterPolicy, RoutingKind, Transport


@dataclass(frozen=True)
class Trial:
    """One measurement: an arm at a cell, once.

    Attributes:
        trial_id: Unique in a sweep and equal in every run of the same configuration.
        measure: `a2a` or `serving`.
        arm: Name of what is compared.
        cell: Name of the workload point.
        repeat: 0-based.
        config_hash: Of everything that can change the result; not of ports and deadlines.
        config_json: The configuration of the trial, readable.
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
