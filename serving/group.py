"""A group of engines that serves one arm: started together, watched together, ended together.

Ranks of a group share collectives, so one that is gone leaves the others hanging: the group is
one unit. Every wait has a deadline, and `stop` reports what it could not remove.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ep_ray.interrupt import uninterrupted
from serving.engine import Launch
from serving.engine_actor import EngineFacts, EngineTimeoutError, Started
from serving.engine_http import Counters
from serving.engine_process import kill_session
from serving.port_race import lost_port_race
from serving.ports import wait_free

CALL_S = 30.0  # a call that only reads; the actor may be busy starting
ACTOR_START_S = 120.0
KILL_S = 20.0  # longest time from SIGKILL to a free port
OTHERS_S = 2.0  # after a first failure: how long to hear whether another rank failed before it


class GroupError(RuntimeError):
    """A group did not come up, or a rank of it died. The message holds each rank's reason.

    Attributes:
        timed_out: Whether a deadline passed and no rank said anything worse.
        port_race: How start-up lost a race for a port, where it did and nothing is left of the
            group: it may be started once more.
    """

    def __init__(self, message: str, timed_out: bool = False, port_race: str | None = None) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.port_race = port_race


@dataclass(frozen=True)
class Endpoint:
    """A rank that answers: its name in the ledger and its base URL."""

    name: str
    url: str


class EngineGroup:
    """The engines of one arm. Whoever deploys it calls `stop`, whatever happens.

    Attributes:
        launches: How its ranks were started, in rank order.
        restarted_for: Why the whole group had to be started a second time; None where once did.
    """

    def __init__(self, launches: Sequence[Launch], actors: Sequence[Any]) -> None:
        self.launches = list(launches)
        self.restarted_for: str | None = None
        self._actors = list(actors)
        self._started: list[Started | None] = [None] * len(actors)

    @property
    def endpoints(self) -> list[Endpoint]:
        return [Endpoint(launch.name, launch.url) for launch in self.launches]

    def start(self, startup_timeout_s: float, actor_start_s: float = ACTOR_START_S) -> None:
        """Starts rank 0, then the others at once, and waits until each has generated a token.

        Raises:
            GroupError: A rank failed or the deadline passed; everything has been torn down.
        """
        deadline = time.monotonic() + startup_timeout_s
        try:
            self._call("start", [0], actor_start_s)
            self._call("start", range(1, len(self._actors)), actor_start_s)
            left_s = max(1.0, deadline - time.monotonic())
            # The ranks keep the deadline themselves, since they know why; here it is a backstop.
            self._call("ready", range(len(self._actors)), left_s + CALL_S, left_s)
        except BaseException as error:
            with uninterrupted():
                race = self._port_race() if isinstance(error, GroupError) else None
                left = self.stop(grace_s=0.0)
            if isinstance(error, GroupError):
                message = f"{error}\nLeft behind: {'; '.join(left)}" if left else str(error)
                raise GroupError(message, error.timed_out, None if left else race) from error
            raise

    def _port_race(self) -> str | None:
        """Reads in the ranks' logs whether start-up lost a race for a port; to be asked at once."""
        if None in self._started:
            return None
        refs = [actor.at_start.remote() for actor in self._actors]
        done, late = ray.wait(refs, num_returns=len(refs), timeout=CALL_S)
        ranks = [_value_or_error(ref) for ref in refs if ref in done]
        if late or any(isinstance(rank, BaseException) for rank in ranks):
            return None
        linked = "--data-parallel-size" in self.launches[0].argv
        return lost_port_race(ranks, linked)

    def check_alive(self, timeout_s: float = CALL_S) -> None:
        """Raises GroupError if a rank died. Costs one short call per rank."""
        answers = self._call("check", range(len(self._actors)), timeout_s)
        reasons = [reason for reason in answers if reason is not None]
        if reasons:
            raise GroupError("\n".join(reasons))

    def check_serving(self, timeout_s: float) -> None:
        """Raises GroupError unless every rank generates a token; its counters count that."""
        ranks = range(len(self._actors))
        self._call("serve_one_token", ranks, timeout_s + CALL_S, timeout_s)

    def probe(self, timeout_s: float) -> dict[str, int | str]:
        """Nanoseconds to one token of each rank asked directly, or why none came; by its name."""
        refs = [actor.serve_one_token.remote(timeout_s) for actor in self._actors]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s + CALL_S)
        found: dict[str, int | str] = {}
        for launch, ref in zip(self.launches, refs, strict=True):
            answer = _value_or_error(ref) if ref in done else TimeoutError("no answer")
            bad = isinstance(answer, BaseException)
            found[launch.name] = _reason(answer) if bad else int(answer)  # type: ignore[arg-type]
        return found

    def watch(self, until: Callable[[], bool], timeout_s: float, interval_s: float = 1.0) -> None:
        """Waits for `until` while all ranks live.

        Raises:
            GroupError: A rank died meanwhile.
            TimeoutError: `until` was still false at the deadline.
        """
        deadline = time.monotonic() + timeout_s
        while not until():
            self.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done within {timeout_s:g} s while all engines lived")
            time.sleep(interval_s)

    def facts(self) -> list[EngineFacts]:
        return list(self._call("facts", range(len(self._actors)), CALL_S))

    def counters(self, timeout_s: float) -> dict[str, Counters]:
        """Settled counters of each engine, by its name. Raises GroupError if they do not settle."""
        ranks = range(len(self._actors))
        settled = self._call("stable_counters", ranks, timeout_s + CALL_S, timeout_s)
        return {launch.name: found for launch, found in zip(self.launches, settled, strict=True)}

    def nccl_lines(self) -> list[list[str]]:
        """What NCCL wrote into each rank's log, on whatever node it lies."""
        return list(self._call("nccl_lines", range(len(self._actors)), CALL_S))

    def log_tails(self, lines: int = 40) -> dict[str, str]:
        """The end of each rank's log, by name; of ranks whose actor still answers."""
        refs = [actor.log_tail.remote(lines) for actor in self._actors]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=CALL_S) if refs else ([], [])
        return {launch.name: _value_or_error(ref) for launch, ref in
                zip(self.launches, refs, strict=False) if ref in done}  # fmt: skip

    def stop(self, grace_s: float = 15.0) -> list[str]:
        """Ends all engines and actors. Returns what is left, in words; empty when all is gone.

        Servers get SIGTERM and `grace_s`; then everything is killed, processes and ports are
        checked on every node, and the actors are gone in any case.
        """
        # An actor that has not started its server has nothing to end; one in the middle of it
        # loses its server when it is killed.
        pairs = zip(self._actors, self._started, strict=True) if self._actors else ()
        refs = [actor.stop.remote(grace_s) for actor, started in pairs if started is not None]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=grace_s + KILL_S, fetch_local=False)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        return self._leftovers()

    def _leftovers(self) -> list[str]:
        checks = {
            _check_on_node(started.node_id).remote(launch, started.session): launch
            for launch, started in zip(self.launches, self._started, strict=True)
            if started is not None
        }
        if not checks:
            return []
        done, late = ray.wait(list(checks), num_returns=len(checks), timeout=KILL_S * 3)
        left = [f"{checks[ref].name}: not checked, its node does not answer" for ref in late]
        for ref in done:
            answer = _value_or_error(ref)
            left += answer if isinstance(answer, list) else [f"{checks[ref].name}: {answer}"]
        self._started = [None] * len(self.launches)
        return left

    def _call(self, method: str, ranks: Sequence[int], timeout_s: float, *args: Any) -> list[Any]:
        """Calls a method of several ranks at once; the first failure ends the wait."""
        refs = {getattr(self._actors[r], method).remote(*args): r for r in ranks}
        deadline, pending = time.monotonic() + timeout_s, list(refs)
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        while pending:
            left_s = deadline - time.monotonic()
            done, pending = ray.wait(pending, timeout=max(0.0, left_s))
            for ref in done:
                answer = _value_or_error(ref)
                (errors if isinstance(answer, BaseException) else answers)[refs[ref]] = answer
            if errors:
                deadline = min(deadline, time.monotonic() + OTHERS_S)
            if not done:
                break
            if method == "start":
                self._note_started(answers)
        if errors or pending:
            late = [refs[ref] for ref in pending]
            timed_out = all(
                isinstance(e, EngineTimeoutError | TimeoutError) for e in errors.values()
            )
            raise GroupError(self._explain(method, errors, late, timeout_s), timed_out)
        return [answers[rank] for rank in ranks]

    def _note_started(self, answers: Mapping[int, Any]) -> None:
        for rank, started in answers.items():
            self._started[rank] = started

    def _explain(
        self, method: str, errors: Mapping[int, BaseException], late: list[int], timeout_s: float
    ) -> str:
        lines = [f"{self.launches[rank].name}: {_reason(error)}" for rank, error in errors.items()]
        if not errors:
            names = ", ".join(self.launches[rank].name for rank in late)
            lines = [f"{names} did not answer {method!r} within {timeout_s:.0f} s"]
            if method == "start":
                lines.append("Ray may have no place for the actor: see `ray status`")
        return "\n".join(lines)


def _leftovers_here(launch: Launch, session: int) -> list[str]:
    """Runs on the engine's node: kills and names what outlived its actor."""
    pids = kill_session(session, KILL_S)
    left = [f"{launch.name}: processes {pids} cannot be killed"] if pids else []
    ports = [claim.first for claim in launch.claims if not claim.probed]
    busy = wait_free(ports, KILL_S)
    return left + ([f"{launch.name}: ports {busy} are still taken"] if busy else [])


def _check_on_node(node_id: str) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_leftovers_here)
    return task.options(num_cpus=0, max_retries=0, scheduling_strategy=here)


def _value_or_error(ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=CALL_S)
    except ray.exceptions.RayTaskError as error:
        return error.cause
    except (ray.exceptions.RayError, TimeoutError) as error:
        return error


def _reason(error: BaseException) -> str:
    """An engine's own error as it is; Ray's errors with their class, for they say little."""
    if isinstance(error, ray.exceptions.RayError):
        return f"its actor is gone ({type(error).__name__}: {error})"
    return str(error)
