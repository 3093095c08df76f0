"""All-to-all workloads that cannot be, found before anything starts. Pure: reads no file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ep_ray.a2a.rows import SCALE_BLOCK
from ep_ray.config.schema import (
    Backend,
    Config,
    DeviceKind,
    LaunchKind,
    RoutingKind,
)

MOST_OVERLAP_US = 1e6
"""A second: no model computes for longer between a send and its receive."""


def backends_of(config: Config) -> list[tuple[str, Backend]]:
    """The backend under test and those it is compared with, in order, by name in the tables."""
    return [(arm_name(config.backend), config.backend), *config.against.backends.items()]


def arm_name(backend: Backend) -> str:
    """How tables call the backend under test: its name, and its variant unless it is `exact`."""
    variant = backend.options.get("variant", "exact")
    return backend.name if variant == "exact" else f"{backend.name}_{variant}"


def check_workload(config: Config) -> Iterator[str]:
    """What is wrong with the all-to-all part of an experiment, and which key mends it."""
    work = config.workload
    if not 1 <= work.topk <= work.experts:
        yield f"`workload.topk={work.topk}`: from 1 to workload.experts={work.experts}"
    if work.hidden < SCALE_BLOCK or work.hidden % SCALE_BLOCK:
        near = max(SCALE_BLOCK, round(work.hidden / SCALE_BLOCK) * SCALE_BLOCK)
        yield (
            f"`workload.hidden={work.hidden}`: a multiple of {SCALE_BLOCK}, the columns that share "
            f"one scale, for example {near}"
        )
    if not work.phases:
        yield "`workload.phases` is empty: name at least one value"
    for name, phase in work.phases.items():
        if phase.tokens < 1 or phase.iterations < 1:
            yield f"`workload.phases.{name}`: tokens and iterations are at least 1"
    for key in ("ep", "routing", "launch"):
        values = getattr(work, key)
        if not values:
            yield f"`workload.{key}` is empty: name at least one value"
        yield from twice(f"workload.{key}", [getattr(value, "name", value) for value in values])
    for ep in work.ep:
        yield from _ep_size(config, ep)
    yield from _routing(config)
    yield from _lengths(config)
    yield from _local_tp(config)
    yield from _ways(config)
    yield from _warmup(config)


def _ep_size(config: Config, ep: int) -> Iterator[str]:
    work = config.workload
    if ep < 1 or work.experts % ep:
        possible = [str(n) for n in range(1, work.experts + 1) if work.experts % n == 0]
        yield (
            f"`workload.ep={ep}`: workload.experts={work.experts} must divide evenly over ranks; "
            f"possible: {', '.join(possible)}"
        )
    elif RoutingKind.one_hot in work.routing and work.experts // ep < work.topk:
        yield (
            f"`workload.routing=one_hot` at EP{ep}: all {work.topk} experts of a token lie on one "
            f"rank, which holds {work.experts // ep}; raise workload.experts or lower workload.topk"
        )


def _routing(config: Config) -> Iterator[str]:
    work = config.workload
    if RoutingKind.file in work.routing and not work.routing_file:
        yield "`workload.routing=file` needs workload.routing_file=PATH (.npy or .parquet)"
    if work.routing_file and RoutingKind.file not in work.routing:
        yield (
            f"`workload.routing_file={work.routing_file}` is not read unless workload.routing "
            "names file"
        )
    if not 0.0 <= work.masked_share <= 1.0:
        yield f"`workload.masked_share={work.masked_share}`: a share from 0 to 1"


def _lengths(config: Config) -> Iterator[str]:
    work = config.workload
    asked = work.tokens_per_rank
    if asked in ("uniform", "ragged"):
        return
    if not isinstance(asked, list) or not all(type(n) is int for n in asked):
        yield f"`workload.tokens_per_rank={asked}`: uniform, ragged, or a list of integers"
        return
    for ep in work.ep:
        if len(asked) != ep:
            yield f"`workload.tokens_per_rank` has {len(asked)} numbers, EP{ep} needs {ep}"
    least = min((phase.tokens for phase in work.phases.values()), default=0)
    if any(not 0 <= n <= least for n in asked):
        yield f"`workload.tokens_per_rank={asked}`: each from 0 to a phase's tokens, {least}"


def _local_tp(config: Config) -> Iterator[str]:
    work = config.workload
    size = work.local_tp
    if size < 1:
        yield f"`workload.local_tp={size}`: at least 1; 1 means that no ranks share tokens"
        return
    if size > 1 and work.tokens_per_rank != "uniform":
        yield (
            f"`workload.local_tp={size}` with workload.tokens_per_rank={work.tokens_per_rank}: "
            "ranks that share a batch have equal parts of it; set tokens_per_rank=uniform"
        )
    for ep in work.ep:
        if ep % size:
            yield f"`workload.local_tp={size}` does not divide EP{ep} into groups"
    for name, phase in work.phases.items():
        if phase.tokens % size:
            yield (
                f"`workload.local_tp={size}` does not divide the {phase.tokens} tokens of "
                f"workload.phases.{name}"
            )


def _ways(config: Config) -> Iterator[str]:
    work = config.workload
    if LaunchKind.graph in work.launch and config.cluster.device is DeviceKind.cpu:
        yield "`workload.launch=graph` on cluster.device=cpu: CUDA graphs need CUDA; use eager"
    if work.overlap_us is not None and not 0 < work.overlap_us <= MOST_OVERLAP_US:
        yield (
            f"`workload.overlap_us={work.overlap_us}`: above 0, at most {MOST_OVERLAP_US:.0f}, or "
            "null for no such operation"
        )
    if work.overlap_us is not None and work.compat is not None:
        yield (
            f"`workload.overlap_us` with workload.compat={work.compat.name}: that benchmark has no "
            "such operation; drop one of them"
        )


def _warmup(config: Config) -> Iterator[str]:
    work = config.workload
    if not 0 <= work.min_warmup <= work.max_warmup:
        yield (
            f"`workload.min_warmup={work.min_warmup}`, workload.max_warmup={work.max_warmup}: "
            "neither is below 0, and the most is not below the fewest"
        )
    for key in ("warmup_tolerance", "zipf_exponent"):
        value = getattr(work, key)
        if not 0 <= value < math.inf:
            yield f"`workload.{key}={value}`: a number, not below 0"


def twice(key: str, values: Sequence[object]) -> Iterator[str]:
    """What is named more than once."""
    for value in dict.fromkeys(values):
        if list(values).count(value) > 1:
            yield f"`{key}` names {value} twice: each cell runs once; for repeats set repeats=N"
