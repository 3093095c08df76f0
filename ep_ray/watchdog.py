"""Deadlines for remote waits, and the end of a group of actors that missed one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_GRACE_S = 2.0  # for a process that Ray told to end
_GONE_S = 10.0  # for one that was killed
_OTHERS_S = 2.0  # for ranks that may tell why another failed


class TrialError(Exception):
    """A trial that gave no result; becomes a row with status and reason.

    Attributes:
        status: `failed` (an error was reported), `timeout` or `crash` (a process died).
        facts: What is known of the arm nevertheless: columns of `trials`.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.facts: dict[str, Any] = {}


def wait_all(refs: Sequence[Any], deadline_s: float, what: str) -> list[Any]:
    """Results of all refs, or the first failure at once: the other ranks may hang for ever.

    A rank that is killed makes its peers fail too, and their errors may arrive before the news
    of its death. So after an error the others are heard for a moment, and a death is the reason.

    Args:
        refs: Ray object refs, one per rank.
        deadline_s: Seconds from now.
        what: What is waited for, for the message.

    Raises:
        TrialError: Deadline, death of an actor, or an error in one.
    """
    end = time.monotonic() + deadline_s
    ranks = {ref: rank for rank, ref in enumerate(refs)}
    results: dict[int, Any] = {}
    first: TrialError | None = None
    pending = list(refs)
    while pending:
        ready, pending = ray.wait(pending, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for ref in ready:
            found = _result(ref, what, f"rank {ranks[ref]}" if len(refs) > 1 else "its actor")
            if not isinstance(found, TrialError):
                results[ranks[ref]] = found
            elif found.status == "crash":
                raise found
            elif first is None:
                first, end = found, min(end, time.monotonic() + _OTHERS_S)
    if first is not None:
        raise first
    if pending:
        raise TrialError("timeout", f"{what}: no answer within {deadline_s:g} s")
    return [results[rank] for rank in range(len(refs))]


def _result(ref: Any, what: str, who: str) -> Any:
    """The result of a ref that is ready, or the `TrialError` that tells why there is none."""
    try:
        return ray.get(ref, timeout=30)
    except GetTimeoutError:
        return TrialError("timeout", f"{what}: result of {who} did not arrive")
    except RayActorError as error:
        return TrialError("crash", f"{what}: {who} died{_exit_detail(error)}")
    except RayTaskError as error:
        return TrialError("failed", f"{what}: {who}: {error.cause or error}")
    except RayError as error:
        return TrialError("crash", f"{what}: {who}: {error}")


def _exit_detail(error: RayActorError) -> str:
    """What Ray knows of the end of the process; its message has it behind much else."""
    _, found, detail = str(error).partition("Worker exit detail: ")
    return f": {detail.partition(' Some common causes')[0].strip()}" if found else ""


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


def kill_all(actors: Sequence[Any], processes: Mapping[str, Sequence[int]]) -> list[str]:
    """Kills actors and waits until their processes are gone.

    Ray asks a process to end itself, which one that is stopped or stuck cannot do: those that
    are still there after a moment are killed by their node's kernel.

    Args:
        actors: Ray actors.
        processes: Their pids, by Ray's id of the node.

    Returns:
        What is left, in words; empty when all is gone.
    """
    for actor in actors:
        ray.kill(actor, no_restart=True)
    here = ray.get_runtime_context().get_node_id()
    elsewhere = {
        _end_on(node).remote(list(pids)): node for node, pids in processes.items() if node != here
    }
    left = [f"process {pid}" for pid in end_processes(processes.get(here, ()))]
    for ref, node in elsewhere.items():
        try:
            left += [f"process {pid} on node {node}" for pid in ray.get(ref, timeout=4 * _GONE_S)]
        except (RayError, GetTimeoutError) as error:
            left.append(f"ranks on node {node} were not checked: {type(error).__name__}")
    return left


def _end_on(node_id: str) -> Any:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(end_processes)
    return task.options(num_cpus=0, max_retries=0, scheduling_strategy=there, name="end_ranks")


def end_processes(pids: Sequence[int]) -> list[int]:
    """Waits for processes of this machine to end, then kills them. Returns those still there."""
    left = [process for pid in pids if (process := _worker(pid)) is not None]
    _, left = psutil.wait_procs(left, timeout=_GRACE_S)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    _, left = psutil.wait_procs(left, timeout=_GONE_S)
    return [process.pid for process in left if process.status() != psutil.STATUS_ZOMBIE]


def _worker(pid: int) -> psutil.Process | None:
    """The process, if it is there and one of Ray's: the kernel may have given the pid anew."""
    try:
        process = psutil.Process(pid)
        return process if "".join(process.cmdline()[:1]).startswith("ray::") else None
    except psutil.NoSuchProcess:
        return None
