"""One all-to-all trial on one rank: check, measure the links, warm up, time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ep_ray.a2a import facts
from ep_ray.a2a.check import check, payload
from ep_ray.a2a.links import gather_hosts, measure_links, node_size
from ep_ray.a2a.routing import Routing, draw
from ep_ray.a2a.stats import Samples, concat, series
from ep_ray.a2a.timing import Timer, Warmup, make_timer, warm_up
from ep_ray.backends.base import Backend, Spec, Tokens
from ep_ray.config.schema import RoutingKind

FLOOR_ITERATIONS = 50
POOL_TOKENS = 1 << 16
"""Tokens per rank over all routings of the pool, which has 4 to 32 of them."""
FAULTS_SHOWN = 20


@dataclass(frozen=True)
class Procedure:
    """How a workload point is measured, the same on every rank.

    Attributes:
        iterations: Measured iterations per operation.
        seed: Seed of the routing.
        routing: How experts are chosen.
        zipf_exponent: Exponent of `zipf` routing.
        min_warmup: Fewest warm-up iterations.
        max_warmup: Most warm-up iterations.
        warmup_tolerance: Relative difference at which warm-up ends.
        check: Whether correctness is checked before timing.
    """

    iterations: int
    seed: int = 0
    routing: RoutingKind = RoutingKind.uniform
    zipf_exponent: float = 1.2
    min_warmup: int = 20
    max_warmup: int = 500
    warmup_tolerance: float = 0.02
    check: bool = True


@dataclass(frozen=True)
class TrialResult:
    """What one rank brings back.

    Attributes:
        rank: This rank.
        samples: This rank's timings; none if the check failed.
        operations: One dict per operation, keyed as the `operations` table after its key; the
            same on every rank.
        error: Why there are no timings, or None.
    """

    rank: int
    samples: Samples
    operations: list[dict[str, Any]]
    error: str | None


def run_trial(
    spec: Spec, procedure: Procedure, backend: Backend, group: ProcessGroup, device: torch.device
) -> TrialResult:
    """Runs one trial; collective over `group`, whose size is `spec.ep`.

    Raises:
        ValueError: The group has another size than `spec.ep`, or the backend or the routing
            cannot do what `spec` asks.
    """
    ranks = dist.get_world_size(group)
    if ranks != spec.ep:
        raise ValueError(f"EP{spec.ep} was asked of a group of {ranks} ranks; they must be equal")
    backend.setup(spec, group, device)
    result = _run_checked(spec, procedure, backend, group, device)
    # Not in a `finally`: destroying is collective, and after an exception on one rank it would
    # wait for peers that wait for this rank, and hide the exception.
    backend.destroy()
    return result


def _run_checked(
    spec: Spec, procedure: Procedure, backend: Backend, group: ProcessGroup, device: torch.device
) -> TrialResult:
    rank = dist.get_rank(group)
    pool = draw_pool(spec, procedure, rank)
    faults = check(backend, spec, group, device, pool) if procedure.check else []
    if faults:
        return TrialResult(rank, concat([]), [], _failure(faults))
    hosts = gather_hosts(group)
    links = measure_links(group, device, node_size(hosts))
    timer = make_timer(group, device, shared_clock=len(set(hosts)) == 1)
    samples, warmups = _time_all(spec, procedure, backend, timer, pool)
    pool_idx = facts.gather_pool(pool, group, device)
    rows = facts.operations(spec, backend, pool_idx, links, warmups, procedure.check)
    return TrialResult(rank, samples, rows, None)


def _failure(faults: list[str]) -> str:
    rest = len(faults) - FAULTS_SHOWN
    more = f"; and {rest} more" if rest > 0 else ""
    return "correctness check failed: " + "; ".join(faults[:FAULTS_SHOWN]) + more


def draw_pool(spec: Spec, procedure: Procedure, rank: int) -> list[Routing]:
    """The routings that iterations of `rank` go through in turn."""
    size = min(32, max(4, POOL_TOKENS // spec.tokens))
    return [
        draw(
            procedure.routing,
            seed=procedure.seed,
            rank=rank,
            iteration=iteration,
            tokens=spec.tokens,
            experts=spec.experts,
            topk=spec.topk,
            ep=spec.ep,
            exponent=procedure.zipf_exponent,
        )
        for iteration in range(size)
    ]


def _time_all(
    spec: Spec, procedure: Procedure, backend: Backend, timer: Timer, pool: list[Routing]
) -> tuple[Samples, dict[str, int]]:
    """All timings of this rank, and the warm-up iterations per operation."""
    tokens = _tokens(spec, backend, timer.device)
    floor = [timer.time_ns(lambda: None) for _ in range(FLOOR_ITERATIONS)]
    parts, warmups = [series("empty", "floor", timer.rank, floor)], {}
    rule = Warmup(procedure.min_warmup, procedure.max_warmup, procedure.warmup_tolerance)
    for op in facts.OPS:
        time_one = partial(_time_one, op, timer, backend, tokens, pool)
        roles = {"cold": [time_one(0)], "warmup": warm_up(time_one, rule, timer)}
        roles["measured"] = [time_one(i) for i in range(procedure.iterations)]
        parts += [series(op, role, timer.rank, durations) for role, durations in roles.items()]
        warmups[op] = len(roles["warmup"])
    return concat(parts), warmups


def _tokens(spec: Spec, backend: Backend, device: torch.device) -> Tokens:
    rows = torch.randn(spec.tokens, spec.hidden, generator=torch.Generator().manual_seed(0))
    return payload(backend, spec, rows.to(device))


def _time_one(
    op: str, timer: Timer, backend: Backend, tokens: Tokens, pool: list[Routing], iteration: int
) -> int:
    """Duration of `op` with the pool's next routing, ns."""
    routing = pool[iteration % len(pool)]
    backend.plan(routing.topk_idx, routing.weights)
    if op == "combine":
        _dispatch(backend, tokens)
    return timer.time_ns(_operation(op, backend, tokens))


def _operation(op: str, backend: Backend, tokens: Tokens) -> Callable[[], None]:
    def pair() -> None:
        _dispatch(backend, tokens)
        _combine(backend)

    operations: dict[str, Callable[[], None]] = {
        "dispatch": partial(_dispatch, backend, tokens),
        "combine": partial(_combine, backend),
        "pair": pair,
    }
    return operations[op]


def _dispatch(backend: Backend, tokens: Tokens) -> None:
    backend.dispatch_send(tokens)
    backend.dispatch_recv()


def _combine(backend: Backend) -> None:
    backend.combine_send()
    backend.combine_recv()
