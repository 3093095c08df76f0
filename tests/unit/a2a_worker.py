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

import numpy as np
import torch
import torch.distributed as dist

from ep_ray.a2a.bench import Procedure, TrialResult, draw_pool, run_trial
from ep_ray.a2a.check import check, gather, payload
from ep_ray.a2a.routing import Routing
from ep_ray.a2a.timing import CpuTimer
from ep_ray.backends.base import Received, Spec, Tokens
from ep_ray.backends.gloo import GlooBackend

CPU = torch.device("cpu")
SIZES = (1, 2, 4)


class SwapsPayloads(GlooBackend):
    """Two received rows change places, their metadata stays."""

    def dispatch_recv(self) -> None:
        rows = self._recv[: sum(self._got), : self.payload_words]
        rows[[0, 1]] = rows[[1, 0]]


class SwapsRows(GlooBackend):
    """Two received rows change places with their metadata: only combine can tell."""

    def dispatch_recv(self) -> None:
        self._recv[[0, 1]] = self._recv[[1, 0]]


class LosesRow(GlooBackend):
    """The last received row is a copy of the first."""

    def dispatch_recv(self) -> None:
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
        self._recv.view(torch.float32)[0, self.payload_words - 1] *= 2


class StaleDispatch(GlooBackend):
    """The first row is left over from the routing before."""

    kept: torch.Tensor | None = None

    def dispatch_recv(self) -> None:
        fresh = self._recv[0].clone()
        if self.kept is not None:
            self._recv[0] = self.kept
        self.kept = fresh


class StaleCombine(GlooBackend):
    """Combine returns what the routing before gave."""

    kept: torch.Tensor | None = None

    def combine_recv(self) -> torch.Tensor:
        fresh = self._out.clone()
        if self.kept is not None:
            self._out.copy_(self.kept)
        self.kept = fresh
        return self._out


class SkipsOutput(GlooBackend):
    """Combine leaves one row as it was: poisoned."""

    def combine_recv(self) -> torch.Tensor:
        self._out[-1] = float("nan")
        return self._out


class WrongWeight(GlooBackend):
    """One weight arrives one part in 2 ** 20 too large."""

    def dispatch_recv(self) -> None:
        _, weights = self._metadata(self._recv[: sum(self._got)])
        weights *= 1 + 2.0**-20


class IgnoresWeights(GlooBackend):
    """Experts weigh all their choices alike."""

    def apply_experts(self, factors: torch.Tensor) -> None:
        _, weights = self._metadata(self._recv[: sum(self._got)])
        weights.fill_(1 / self.spec.topk)
        super().apply_experts(factors)


class WrongExpert(GlooBackend):
    """Every row is meant for the first local expert."""

    def dispatch_recv(self) -> None:
        ids, _ = self._metadata(self._recv[: sum(self._got)])
        ids[ids >= 0] = 0


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


def checked(spec: Spec, procedure: Procedure, wrong: str | None, masked: float) -> list[str]:
    """The check's verdict on gloo, or on a wrong variant of it at rank 0."""
    group = GROUPS[spec.ep]
    rank = dist.get_rank(group)
    pool = [_mask(routing, masked, rank) for routing in draw_pool(spec, procedure, rank)]
    backend = WRONG[wrong]({}) if wrong and rank == 0 else GlooBackend({})
    backend.setup(spec, group, CPU)
    faults = check(backend, spec, group, CPU, pool)
    backend.destroy()
    return faults


def _mask(routing: Routing, share: float, rank: int) -> Routing:
    chosen = np.random.default_rng(rank).random(routing.topk_idx.shape) < share
    masked = torch.from_numpy(chosen)
    return Routing(
        routing.topk_idx.masked_fill(masked, -1), routing.weights.masked_fill(masked, 0.0)
    )


def trial(spec: Spec, procedure: Procedure, wrong: str | None) -> TrialResult:
    """`run_trial` on gloo, or with a wrong variant of it at rank 0."""
    group = GROUPS[spec.ep]
    backend = WRONG[wrong]({}) if wrong and dist.get_rank(group) == 0 else GlooBackend({})
    return run_trial(spec, procedure, backend, group, CPU)


def wire(spec: Spec, procedure: Procedure) -> dict[str, tuple[int, int]]:
    """Bytes that leave this rank for others, per operation: declared and counted."""
    group = GROUPS[spec.ep]
    rank = dist.get_rank(group)
    routing = draw_pool(spec, procedure, rank)[0]
    backend = GlooBackend({})
    backend.setup(spec, group, CPU)
    backend.plan(routing.topk_idx, routing.weights)
    tokens: Tokens = payload(backend, spec, torch.ones(spec.tokens, spec.hidden))
    declared = backend.wire_bytes(gather(routing, group, CPU).topk_idx)
    with Counting(rank, spec.ep) as dispatch:
        backend.dispatch_send(tokens)
    with Counting(rank, spec.ep) as combine:
        backend.combine_send()
    return {
        "dispatch": (int(declared.dispatch[rank].sum()), dispatch.sent),
        "combine": (int(declared.combine[rank].sum()), combine.sent),
    }


def common_start(ep: int) -> tuple[int, int]:
    """When this rank came to the barrier and when its operation started, on the host's clock."""
    group = GROUPS[ep]
    timer = CpuTimer(group, shared_clock=True)
    time.sleep(0.02 * dist.get_rank(group))
    came, started = time.perf_counter_ns(), []
    duration_ns = timer.time_ns(lambda: started.append(time.perf_counter_ns()))
    assert duration_ns >= 0
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
CASES = {"checked": checked, "trial": trial, "wire": wire, "common_start": common_start}


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
