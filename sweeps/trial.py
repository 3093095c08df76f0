"""What a trial is, and how it is told from every other. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeVar

from ep_ray.config.schema import (
    Arm,
    ArrivalKind,
    Backend,
    CompatKind,
    LaunchKind,
    Measure,
    RouterPolicy,
    RoutingKind,
    Transport,
)
from ep_ray.layout import has_engines

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
    launch: LaunchKind
    compat: CompatKind | None


@dataclass(frozen=True)
class LoadPoint:
    """How much load a cell asks for.

    Attributes:
        concurrency: Requests in flight in a closed loop; 0 in an open one.
        rate_per_s: Requests per second of an open loop; None in a closed one.
        requests: Measured requests.
    """

    concurrency: int
    rate_per_s: float | None
    requests: int

    @property
    def name(self) -> str:
        """`c16`, or `q2.5` for 2.5 requests per second."""
        return f"c{self.concurrency}" if self.rate_per_s is None else f"q{self.rate_per_s:g}"


@dataclass(frozen=True)
class ServingTrial(Trial):
    """One cell against one arm.

    Attributes:
        prompt_tokens: Length of the prompts; None where a file gives it, likewise completions.
        concurrency: Requests in flight in a closed loop; 0 in an open one.
        rate_per_s: Requests per second of an open loop; None in a closed one.
        deployment: Equal for arms that differ only in how requests reach the engines; they
            share the engines and take turns cell by cell.
        router_processes: Of ep-ray's own router; None without one.
    """

    layout: Arm
    deployment: str
    transport: Transport
    router: RouterPolicy
    shape: str
    prompt_tokens: int | None
    completion_tokens: int | None
    concurrency: int
    requests: int
    arrival: ArrivalKind = ArrivalKind.closed
    rate_per_s: float | None = None
    router_processes: int | None = None

    @property
    def block(self) -> str:
        """Neighbours with the same block share engines."""
        return f"serving/{self.deployment}"

    @property
    def gpus(self) -> int:
        """GPUs that the arm takes; 0 where ep-ray starts no engine with a model."""
        return self.layout.tp * self.layout.dp if has_engines(self.layout) else 0


@dataclass(frozen=True)
class Side:
    """The configuration that trials of one arm share, as JSON: all of it, and what is hashed."""

    full: str
    hashed: str

    @classmethod
    def of(cls, full: dict[str, Any], hashed: dict[str, Any] | None = None) -> Side:
        """From plain values; everything is hashed unless `hashed` says what is."""
        return cls(dump(full), dump(full if hashed is None else hashed))


def identity(
    measure: Measure, arm: str, cell: str, repeat: int, side: Side, more: dict[str, Any]
) -> dict[str, Any]:
    """The fields that every trial has; `more` is what the cell adds to the configuration."""
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


def mirrored(items: list[_T], repeat: int) -> list[_T]:
    """The items, backwards in every second repeat."""
    return items[::-1] if repeat % 2 else items


def without(node: Any, keys: Sequence[str]) -> dict[str, Any]:
    """The fields of a dataclass but for these."""
    return {key: value for key, value in asdict(node).items() if key not in keys}


def dump(node: dict[str, Any]) -> str:
    """JSON of plain values, dataclasses and enumerations, in a fixed order."""
    return json.dumps(node, default=_jsonable, sort_keys=True)


def _jsonable(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else asdict(value)
