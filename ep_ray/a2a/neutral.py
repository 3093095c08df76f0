"""The project's own way of measuring: cold, warm-up until settled, measured iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ep_ray.a2a.launch import Launch
from ep_ray.a2a.measured import Measured
from ep_ray.a2a.procedure import Procedure
from ep_ray.a2a.routing import Routing
from ep_ray.a2a.timing import Timer, Warmup, warm_up

FLOOR_ITERATIONS = 50


@dataclass(frozen=True)
class Run:
    """Operations timed one after another in the same iteration, each with samples of its own.

    Attributes:
        ops: Their names.
        after_dispatch: Whether a dispatch runs before, outside the clock.
    """

    ops: tuple[str, ...]
    after_dispatch: bool = False


def runs(split: bool, overlapped: bool) -> list[Run]:
    """What is timed, in order.

    Args:
        split: Whether send and receive are timed apart.
        overlapped: Whether there is work to hide between them.
    """
    found = [Run(("dispatch",)), Run(("combine",), after_dispatch=True), Run(("pair",))]
    if split:
        found.append(Run(("dispatch_send", "dispatch_recv")))
        found.append(Run(("combine_send", "combine_recv"), after_dispatch=True))
    if overlapped:
        found += [Run(("pair_overlapped",)), Run(("work",))]
    return found


def measure(
    procedure: Procedure,
    launch: Launch,
    timer: Timer,
    pool: Sequence[Routing],
    wanted: Sequence[Run],
) -> Measured:
    """All timings of this rank, and the warm-up iterations per operation; collective.

    Args:
        pool: Routings on the device.
        wanted: From `runs`.
    """
    measured = Measured(timer.rank)
    measured.add("empty", "floor", [timer.time_ns(_nothing)[0] for _ in range(FLOOR_ITERATIONS)])
    for run in wanted:
        _measure_run(run, procedure, launch, timer, pool, measured)
    return measured


def _nothing() -> None:
    pass


def _measure_run(
    run: Run,
    procedure: Procedure,
    launch: Launch,
    timer: Timer,
    pool: Sequence[Routing],
    measured: Measured,
) -> None:
    rule = Warmup(procedure.min_warmup, procedure.max_warmup, procedure.warmup_tolerance)
    time_one = partial(_time_one, run, launch, timer, pool)
    roles = {"cold": [time_one(0)], "warmup": warm_up(time_one, rule, timer)}
    roles["measured"] = [time_one(i) for i in range(procedure.iterations)]
    for index, op in enumerate(run.ops):
        for role, stages in roles.items():
            measured.add(op, role, [durations[index] for durations in stages])
        measured.warmups[op] = len(roles["warmup"])


def _time_one(
    run: Run, launch: Launch, timer: Timer, pool: Sequence[Routing], iteration: int
) -> list[int]:
    """Durations of the run's operations with the pool's next routing, ns."""
    launch.load(pool[iteration % len(pool)])
    if run.after_dispatch:
        launch.call("dispatch")()
    return timer.time_ns(*[launch.call(op) for op in run.ops])
