"""Deadlines for remote waits, and the end of a group of actors that missed one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

_GONE_S = 10.0


class TrialError(Exception):
    """A trial that gave no result; becomes a row with status and reason.

    Attributes:
        status: `failed` (an error was reported), `timeout` or `crash` (a process died).
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def wait_all(refs: Sequence[Any], deadline_s: float, what: str) -> list[Any]:
    """Results of all refs, or the first failure at once: the other ranks may hang for ever.

    Args:
        refs: Ray object refs, one per rank.
        deadline_s: Seconds from now.
        what: What is waited for, for the message.

    Raises:
        TrialError: Deadline, death of an actor, or an error in one.
    """
    end = time.monotonic() + deadline_s
    pending = list(refs)
    while pending:
        ready, pending = ray.wait(pending, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise TrialError("timeout", f"{what}: no answer within {deadline_s:g} s")
        for ref in ready:
            _result(ref, what, refs.index(ref))
    return [_result(ref, what, rank) for rank, ref in enumerate(refs)]


def _result(ref: Any, what: str, rank: int) -> Any:
    try:
        return ray.get(ref, timeout=30)
    except GetTimeoutError as error:
        raise TrialError("timeout", f"{what}: result of rank {rank} did not arrive") from error
    except RayActorError as error:
        raise TrialError("crash", f"{what}: the process of rank {rank} died") from error
    except RayTaskError as error:
        cause = error.cause or error
        raise TrialError("failed", f"{what}: rank {rank}: {cause}") from error
    except RayError as error:
        raise TrialError("crash", f"{what}: rank {rank}: {error}") from error


def stacks(actors: Sequence[Any], method: str = "stacks", timeout_s: float = 5.0) -> str:
    """Stack traces of actors that answer, for the log of a trial that timed out."""
    refs = {rank: getattr(actor, method).remote() for rank, actor in enumerate(actors)}
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    texts: list[str] = []
    for rank, ref in refs.items():
        if ref not in ready:
            texts.append(f"rank {rank}: no answer")
            continue
        try:
            texts.append(f"rank {rank}:\n{ray.get(ref, timeout=timeout_s)}")
        except RayError as error:
            texts.append(f"rank {rank}: {type(error).__name__}")
    return "\n".join(texts)


def kill_all(actors: Sequence[Any], local_pids: Sequence[int] = ()) -> list[int]:
    """Kills actors and waits until their processes on this machine are gone.

    Returns:
        Pids that are still there after the deadline.
    """
    for actor in actors:
        ray.kill(actor, no_restart=True)
    end = time.monotonic() + _GONE_S
    left = list(local_pids)
    while left and time.monotonic() < end:
        left = [pid for pid in left if _alive(pid)]
        if left:
            time.sleep(0.05)
    return left


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
