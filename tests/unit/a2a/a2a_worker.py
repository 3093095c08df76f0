"""One gloo rank of the test pool: reads pickled (case, arguments) and answers in kind.

Started as `python a2a_worker.py RANK WORLD STORE_FILE`; a group of the first n ranks exists for
each n asked for. Not a test module.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ep_ray.a2a.bench import run_trial
from ep_ray.a2a.check import check, payload
from ep_ray.a2a.launch import Launch
from ep_ray.a2a.pool import draw_pool, full_length, gather
from ep_ray.a2a.procedure import Procedure, TrialResult
from ep_ray.a2a.timing import CpuTimer
from ep_ray.backends import registry
from ep_ray.backends.base import Received, Spec
from ep_ray.backends.gloo import GlooBackend

CPU = torch.device("cpu")
SIZES = (1, 2, 4)


class SwapsPayloads(GlooBackend):
    """Two received rows change places, their metadata stays."""

    def dispatch_recv(self) -> None:
        super().dispatch_recv()
        rows = self._recv[: sum(self._got), : self.payload_words]
        rows[[0, 1]] = rows[[1, 0]]


class SwapsRows(GlooBackend):
    """Two received rows change places with their metadata: only combine can tell."""

    def dispatch_recv(self) -> None:
        super().dispatch_recv()
        self._recv[[0, 1]] = self._recv[[1, 0]]


class LosesRow(GlooBackend):
    """The last received row is a copy of the first."""

    def dispatch_recv(self) -> None:
        super().dispatch_recv()
        self._recv[sum(self._got) - 1] = self._recv[0]


class HidesRow(GlooBackend):
    """One row fewer than announced."""

    def received(self) -> Received:
        got = super().received()
        assert got.weights is not None
        return replace(
            got, rows=got.rows[:-1], topk_idx=got.topk_idx[:-1], weights=got.weights[:-1]
        )


class WrongScale(GlooBackend):
    """The scale of one block of one row is doubled."""

    def dispatch_recv(self) -> None:
        super().dispatch_recv()
        self._recv.view(torch.float32)[0, self.payload_words - 1] *= 2


class StaleDispatch(GlooBackend):
    """The first row is left over from the routing before."""

    kept: torch.Tensor | None = None

    def dispatch_recv(self) -> None:
        super().dispatch_recv()
        fresh = self._recv[0].clone()
        if self.kept is not None:
            self._recv[0] = self.kept
        self.kept = fresh


class StaleCombine(GlooBackend):
    """Combine returns what the routing before gave."""

    kept: torch.Tensor | None = None

    def combine_recv(self) -> torch.Tensor:
        fresh = super().combine_recv()
        stale, self.kept = self.kept, fresh
        return fresh if stale is None else stale


class SkipsOutput(GlooBackend):
    """Combine leaves one row as it was: poisoned."""

    def combine_recv(self) -> torch.Tensor:
        out = super().combine_recv()
        out[-1] = float("nan")
        return out


class WrongWeight(GlooBackend):
    """One weight arrives one part in 2 ** 20 too large."""

    def dispatch_recv(self) -> None:
        super().dispatch_recv()
        _, weights = self._metadata(self._recv[: sum(self._got)])
        weights *= 1 + 2.0**-20


class IgnoresWeights(GlooBackend):
    """Experts weigh all their choices alike."""

    def apply_experts(self, factors: torch.Tensor) -> None:
        _, weights = self._metadata(self._recv[: sum(self._got)])
        weights.fill_(1 / self.spec.topk)
        self._last = None  # what was read before it changed
        super().apply_experts(factors)


class WrongExpert(GlooBackend):
    """Every row is meant for the first local expert."""

    def dispatch_recv(self) -> None:
        super().dispatch_recv()
        ids, _ = self._metadata(self._recv[: sum(self._got)])
        ids[self._local(ids) >= 0] = self.rank * self.spec.local_experts


class Miscounts(GlooBackend):
    """Announces one row too many."""

    def received(self) -> Received:
        got = super().received()
        assert got.source_counts is not None
        return replace(got, source_counts=got.source_counts + 1)


WRONG = {
    cls.__name__: cls
    for cls in (
        *(SwapsPayloads, SwapsRows, LosesRow, HidesRow, WrongScale, StaleDispatch),
        *(StaleCombine, SkipsOutput, WrongWeight, IgnoresWeights, WrongExpert, Miscounts),
    )
}


def make(options: dict[str, Any], wrong: str | None, rank: int) -> Any:
    """Gloo as `options` say, or a wrong kind of its exact variant at rank 0."""
    return WRONG[wrong]({}) if wrong and rank == 0 else registry.load("gloo", options)


def checked(
    spec: Spec, procedure: Procedure, options: dict[str, Any], wrong: str | None
) -> list[str]:
    """The check's verdict."""
    group = GROUPS[spec.ep]
    rank = dist.get_rank(group)
    backend = make(options, wrong, rank)
    backend.setup(spec, group, CPU)
    faults = check(backend, spec, group, CPU, draw_pool(spec, procedure, rank))
    backend.destroy()
    return faults


def trial(
    spec: Spec, procedure: Procedure, options: dict[str, Any], wrong: str | None, table: Any = None
) -> TrialResult:
    """`run_trial`."""
    group = GROUPS[spec.ep]
    backend = make(options, wrong, dist.get_rank(group))
    return run_trial(spec, procedure, backend, group, CPU, table=table)


def wire(spec: Spec, procedure: Procedure, options: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Bytes that leave this rank for others, per operation: declared and counted."""
    group = GROUPS[spec.ep]
    rank = dist.get_rank(group)
    routing = full_length(draw_pool(spec, procedure, rank)[0], spec.tokens)
    backend = make(options, None, rank)
    backend.setup(spec, group, CPU)
    launch = Launch(backend, payload(backend, spec, torch.ones(spec.tokens, spec.hidden)))
    launch.load(routing)
    declared = backend.wire_bytes(gather([routing], spec.tokens, group, CPU)[0][0])
    with Counting(rank, spec.ep) as dispatch:
        launch.call("dispatch")()
    with Counting(rank, spec.ep) as combine:
        launch.call("combine")()
    return {
        "dispatch": (int(declared.dispatch[rank].sum()), dispatch.sent),
        "combine": (int(declared.combine[rank].sum()), combine.sent),
    }


def received_rows(spec: Spec, procedure: Procedure, options: dict[str, Any]) -> int:
    """Rows that this rank received in a dispatch of the pool's first routing."""
    group = GROUPS[spec.ep]
    rank = dist.get_rank(group)
    backend = make(options, None, rank)
    backend.setup(spec, group, CPU)
    launch = Launch(backend, payload(backend, spec, torch.ones(spec.tokens, spec.hidden)))
    launch.load(draw_pool(spec, procedure, rank)[0])
    launch.call("dispatch")()
    return len(backend.received().rows)


def common_start(ep: int) -> tuple[int, int]:
    """When this rank came to the barrier and when its operation started, on the host's clock."""
    group = GROUPS[ep]
    timer = CpuTimer(group, shared_clock=True)
    time.sleep(0.02 * dist.get_rank(group))
    came, started = time.perf_counter_ns(), []
    durations_ns = timer.time_ns(
        lambda: started.append(time.perf_counter_ns()), lambda: time.sleep(0.002)
    )
    assert durations_ns[0] >= 0
    assert durations_ns[1] >= 2_000_000
    return came, started[0]


class Counting:
    """Counts bytes that `all_to_all_single` sends to other ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.sent = rank, ranks, 0

    def __enter__(self) -> Counting:
        self.real = dist.all_to_all_single
        dist.all_to_all_single = self._counted
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self.real

    def _counted(
        self,
        output: torch.Tensor,
        sent: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
        **rest: Any,
    ) -> object:
        splits = splits or [len(sent) // self.ranks] * self.ranks
        row = sent[:1].nbytes if len(sent) else 0
        self.sent += (sum(splits) - splits[self.rank]) * row
        return self.real(output, sent, output_splits, splits, **rest)


GROUPS: dict[int, Any] = {}
CASES = {case.__name__: case for case in (checked, trial, wire, received_rows, common_start)}


def main() -> None:
    rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # Answers keep the pipe to themselves: whatever prints goes to stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    store = dist.FileStore(path, world)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    GROUPS.update({size: dist.new_group(list(range(size)), timeout=limit) for size in SIZES})
    while True:
        try:
            case, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (CASES[case](*arguments), None)
        except Exception:
            answer = (None, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
