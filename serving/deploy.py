"""Starts the engines of an arm; once more, as a whole, if start-up lost a race for a port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from serving.engine import Launch, Seat
from serving.engine_actor import EngineRank
from serving.group import ACTOR_START_S, EngineGroup, GroupError


def deploy(
    launches: Sequence[Launch],
    seats: Sequence[Seat],
    log_dir: str,
    startup_timeout_s: float,
    actor_start_s: float = ACTOR_START_S,
) -> EngineGroup:
    """Starts the engines of an arm and waits until all serve.

    A group that lost a race for a port (`serving.port_race`) is ended as a whole, its ports are
    seen free, and it is started once more, with the same deadlines; `restarted_for` of the group
    says why. vLLM looks for its ports anew then. Any other failure, and a second one, is final.

    Args:
        launches: From `serving.engine.plan_launches`, in rank order.
        seats: The same seats; `options` place each rank's actor.
        log_dir: Absolute folder, on each node, for `engine-ARM-rankN.log`; starts append to it.
        startup_timeout_s: Deadline for all ranks together (`arm.startup_timeout_s`), per start.
        actor_start_s: Deadline for the actors (`deadlines.actor_start_s`), per start.

    Raises:
        GroupError: The group did not come up; nothing of it is left, or the message says what.
    """
    try:
        return _start(launches, seats, log_dir, startup_timeout_s, actor_start_s)
    except GroupError as first:
        if first.port_race is None:
            raise
        race = first.port_race
    try:
        group = _start(launches, seats, log_dir, startup_timeout_s, actor_start_s)
    except GroupError as second:
        why = f"started once more, for it had lost a race for a port: {race}\n{second}"
        raise GroupError(why, second.timed_out) from second
    group.restarted_for = race
    return group


def _start(
    launches: Sequence[Launch],
    seats: Sequence[Seat],
    log_dir: str,
    startup_timeout_s: float,
    actor_start_s: float,
) -> EngineGroup:
    remote = ray.remote(EngineRank)
    actors = [
        remote.options(**_actor_options(launch, seat)).remote(launch, log_dir)
        for launch, seat in zip(launches, seats, strict=True)
    ]
    group = EngineGroup(launches, actors)
    group.start(startup_timeout_s, actor_start_s)
    return group


def _actor_options(launch: Launch, seat: Seat) -> dict[str, Any]:
    # max_restarts=0: a restarted rank cannot rejoin its group. max_concurrency: `stop` and
    # `check` must be answered while `ready` waits.
    return {**seat.options, "name": launch.name, "max_restarts": 0, "max_concurrency": 4}
