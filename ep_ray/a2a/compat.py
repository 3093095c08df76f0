"""Measuring as other projects' benchmarks do; docs/measuring.md says what each one does.

Only the way of measuring is theirs (what lies between operations, fixed or new routing, how
often, what a sample is); the operation, its check and its bytes are the same as always.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ep_ray.a2a.launch import Launch
from ep_ray.a2a.measured import Measured
from ep_ray.a2a.procedure import Procedure
from ep_ray.a2a.routing import Routing
from ep_ray.a2a.timing import Operation, Stamp, Timer, spans_ns
from ep_ray.config.schema import CompatKind

FIXED_ROUTING = {CompatKind.nccl_tests, CompatKind.uccl, CompatKind.deepep}
LOOP = 20
"""nccl-tests: operations in a loop, its default `-n`."""
LOOP_WARMUP = 5
DEEPEP_WARMUP = 50
GEMM = {"cuda": {True: 2048, False: 8192}, "cpu": {True: 128, False: 128}}
"""pplx-garden: size of its float32 matmul up to 128 tokens, and above. A CPU would take a second
for one of them."""
SPLIT = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")


def measure(
    procedure: Procedure,
    launch: Launch,
    timer: Timer,
    pool: Sequence[Routing],
    split: bool,
    few: bool,
) -> Measured:
    """All timings of this rank in the way of `procedure.compat`; collective.

    Args:
        pool: Routings on the device.
        split: Whether the backend separates send and receive, eagerly.
        few: Whether a rank sends at most 128 tokens.
    """
    ways: dict[CompatKind, Callable[[], Measured]] = {
        CompatKind.nccl_tests: lambda: _nccl_tests(procedure, launch, timer, pool[0]),
        CompatKind.uccl: lambda: _uccl(procedure, launch, timer, pool[0]),
        CompatKind.deepep: lambda: _deepep(procedure, launch, timer, pool[0]),
        CompatKind.pplx_garden: lambda: _pplx_garden(procedure, launch, timer, pool, split, few),
    }
    assert procedure.compat is not None
    return ways[procedure.compat]()


def _nccl_tests(procedure: Procedure, launch: Launch, timer: Timer, routing: Routing) -> Measured:
    """Host time of loops of equal operations after a barrier."""
    measured = Measured(timer.rank, loop=LOOP)
    launch.load(routing)
    launch.call("dispatch")()
    for op in ("dispatch", "combine", "pair"):
        operation = launch.call(op)
        _repeat(operation, LOOP_WARMUP)
        loops = range(max(1, procedure.iterations // LOOP))
        measured.add(op, "measured", [_loop_ns(operation, timer) for _ in loops])
        measured.warmups[op] = LOOP_WARMUP
    return measured


def _loop_ns(operation: Operation, timer: Timer) -> int:
    timer.settle()
    dist.barrier(timer.group)
    start = time.perf_counter_ns()
    _repeat(operation, LOOP)
    timer.settle()
    return round((time.perf_counter_ns() - start) / LOOP)


def _repeat(operation: Operation, times: int) -> None:
    for _ in range(times):
        operation()


def _uccl(procedure: Procedure, launch: Launch, timer: Timer, routing: Routing) -> Measured:
    """Back to back with a fixed routing: all dispatches, then all combines."""
    measured = Measured(timer.rank)
    launch.load(routing)
    _repeat(launch.call("pair"), procedure.iterations)
    for op in ("dispatch", "combine"):
        stages = [[launch.call(op)]] * procedure.iterations
        measured.add(op, "measured", [spans[0] for spans in _stamped(stages, timer)])
        measured.warmups[op] = procedure.iterations
    return measured


def _stamped(
    stages: Sequence[Sequence[Operation]], timer: Timer, between: Operation | None = None
) -> list[list[int]]:
    """Durations of each group of stages; `between` runs before each, outside its timings."""
    counts = [len(group) + 1 for group in stages]
    rest = iter(timer.stamps(sum(counts)))
    stamped: list[list[Stamp]] = []
    timer.settle()
    for group in stages:
        if between is not None:
            between()
        stamps = [next(rest)]
        stamps[0].record()
        for stage in group:
            stage()
            stamps.append(next(rest))
            stamps[-1].record()
        stamped.append(stamps)
    timer.settle()
    return [spans_ns(stamps) for stamps in stamped]


def _deepep(procedure: Procedure, launch: Launch, timer: Timer, routing: Routing) -> Measured:
    """The pair back to back; then dispatch and combine with a flush and a pause before each pair.

    The first of the pairs, which meets a flushed cache, is left out there: kept as `cold` here.
    """
    measured = Measured(timer.rank)
    launch.load(routing)
    _repeat(launch.call("pair"), DEEPEP_WARMUP)
    timer.flush()
    pairs = _stamped([[launch.call("pair")]] * (procedure.iterations + 1), timer)
    measured.add("pair", "cold", pairs[0])
    measured.add("pair", "measured", [spans[0] for spans in pairs[1:]])

    def between() -> None:
        timer.flush()
        timer.pause()

    timer.align()
    both = [[launch.call("dispatch"), launch.call("combine")]] * procedure.iterations
    spans = _stamped(both, timer, between)
    for index, op in enumerate(("dispatch", "combine")):
        measured.add(op, "measured", [span[index] for span in spans])
    measured.warmups = dict.fromkeys(("dispatch", "combine", "pair"), DEEPEP_WARMUP)
    return measured


def _pplx_garden(
    procedure: Procedure,
    launch: Launch,
    timer: Timer,
    pool: Sequence[Routing],
    split: bool,
    few: bool,
) -> Measured:
    """New routing in each iteration; all-reduce, matmul, all-reduce before every operation."""
    measured = Measured(timer.rank)
    wait = _Wait(timer, few)
    ops = ("dispatch", "combine", *(SPLIT if split else ()))
    total = 2 * procedure.iterations
    stamps = timer.stamps(total * 2 * len(ops))
    rest = iter(stamps)
    for i in range(total):
        launch.load(pool[i % len(pool)])
        for op in ops:
            operation, start, end = launch.call(op), next(rest), next(rest)
            wait()
            start.record()
            operation()
            end.record()
    timer.settle()
    for index, op in enumerate(ops):
        starts = stamps[2 * index :: 2 * len(ops)]
        ends = stamps[2 * index + 1 :: 2 * len(ops)]
        spans = [end.since_ns(start) for start, end in zip(starts, ends, strict=True)]
        measured.add(op, "warmup", spans[: procedure.iterations])
        measured.add(op, "measured", spans[procedure.iterations :])
        measured.warmups[op] = procedure.iterations
    return measured


class _Wait:
    """Stands for the layers between: an all-reduce, a matmul, an all-reduce."""

    def __init__(self, timer: Timer, few: bool) -> None:
        size = GEMM[timer.device.type][few]
        self._group = timer.group
        self._matrix = torch.ones(size, size, device=timer.device)
        self._product = torch.empty_like(self._matrix)
        self._one = torch.ones(1, device=timer.device)

    def __call__(self) -> None:
        dist.all_reduce(self._one, dist.ReduceOp.MAX, group=self._group)
        torch.mm(self._matrix, self._matrix, out=self._product)
        dist.all_reduce(self._one, dist.ReduceOp.MAX, group=self._group)
