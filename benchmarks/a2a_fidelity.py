"""Does the instrument measure what a plain script measures? All-to-all over gloo, two ranks.

    python benchmarks/a2a_fidelity.py [--blocks 20]

1. `workload.compat=nccl_tests` against `Plain`, which knows nothing of ep-ray: the same bytes in
   the same calls, timed as nccl-tests does. They take turns in one run, in the same processes.
2. Two instances of the neutral protocol, taking turns in the same way.

A ratio is the median over blocks, with its bootstrap 95 % interval. It passes where the interval
contains 1 or lies within 5 % of it. Exit code 1 if one does not pass.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ep_ray.a2a.bench import run_trial
from ep_ray.a2a.links import measure_fabric
from ep_ray.a2a.procedure import Procedure
from ep_ray.a2a.statistic import statistic
from ep_ray.a2a.stats import concat
from ep_ray.backends import registry
from ep_ray.backends.base import Spec
from ep_ray.config.schema import CompatKind
from sweeps.stats import Ratio, paired_ratio

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK = 2, 128, 7168, 256, 8
LOOPS, PER_LOOP = 5, 20
OPS = ("dispatch", "combine", "pair")
WITHIN = 0.05
CPU = torch.device("cpu")


class Plain:
    """What one writes by hand: pack rows, scales, experts and weights; exchange; sum back."""

    def __init__(self) -> None:
        words = HIDDEN // 4 + HIDDEN // 128 + 2 * TOPK
        self.rows = torch.zeros(TOKENS, HIDDEN // 4, dtype=torch.int32)
        self.scales = torch.ones(TOKENS, HIDDEN // 128).view(torch.int32)
        generator = torch.Generator().manual_seed(0)
        self.experts = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices
        self.weights = torch.full((TOKENS, TOPK), 1 / TOPK)
        self.send, self.recv = (torch.zeros(RANKS, TOKENS, words, dtype=torch.int32) for _ in "ab")
        slots = (RANKS * TOKENS + 1, HIDDEN // 2)
        self.out, self.back = (torch.zeros(slots, dtype=torch.int32) for _ in "ab")

    def dispatch(self) -> None:
        a, b = HIDDEN // 4, HIDDEN // 4 + HIDDEN // 128
        self.send[..., :a] = self.rows
        self.send[..., a:b] = self.scales
        self.send[..., b : b + TOPK] = self.experts
        self.send[..., b + TOPK :].view(torch.float32).copy_(self.weights)
        dist.all_to_all_single(self.recv, self.send)

    def combine(self) -> torch.Tensor:
        dist.all_to_all_single(self.back[:-1], self.out[:-1])
        rank = self.experts // (EXPERTS // RANKS)
        again = (rank.unsqueeze(2) == rank.unsqueeze(1)).tril(-1).any(2)
        slot = torch.where(again, RANKS * TOKENS, rank * TOKENS + torch.arange(TOKENS)[:, None])
        return torch.nn.functional.embedding_bag(
            slot, self.back.view(torch.bfloat16), mode="sum", padding_idx=RANKS * TOKENS
        )

    def pair(self) -> None:
        self.dispatch()
        self.combine()

    def time_us(self, op: str) -> float:
        """Host time per operation, mean over ranks, median over loops."""
        operation, loops = getattr(self, op), []
        for _ in range(5):
            operation()
        for _ in range(LOOPS):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(PER_LOOP):
                operation()
            mean = torch.tensor((time.perf_counter() - start) / PER_LOOP / RANKS)
            dist.all_reduce(mean)
            loops.append(mean.item() * 1e6)
        return sorted(loops)[len(loops) // 2]


def ours_us(compat: CompatKind | None, iterations: int, fabric: Any) -> dict[str, float]:
    """One trial through the product's own path: checked, warmed up, timed, with its statistic."""
    spec = Spec(RANKS, TOKENS, HIDDEN, EXPERTS, TOPK)
    how = Procedure(iterations, split=False, compat=compat, max_warmup=40)
    backend = registry.load("gloo", {"variant": "equal"})
    assert dist.group.WORLD is not None
    result = run_trial(spec, how, backend, dist.group.WORLD, CPU, fabric)
    assert result.error is None, result.error
    samples: list[Any] = [None] * RANKS
    dist.all_gather_object(samples, result.samples)
    headline = statistic(compat).of
    return {op: headline(concat(samples), op) / 1e3 for op in OPS}


def blocks(rank: int, count: int, found: dict[str, dict[int, float]]) -> None:
    """Both comparisons, block by block, the order turned round in every second block."""
    assert dist.group.WORLD is not None
    fabric, plain = measure_fabric(dist.group.WORLD, CPU), Plain()
    sides = {
        "plain": lambda: {op: plain.time_us(op) for op in OPS},
        "nccl_tests": lambda: ours_us(CompatKind.nccl_tests, LOOPS * PER_LOOP, fabric),
        "neutral a": lambda: ours_us(None, 100, fabric),
        "neutral b": lambda: ours_us(None, 100, fabric),
    }
    for block in range(-1, count):  # the first one only warms up
        order = list(sides) if block % 2 else list(sides)[::-1]
        for side in order:
            for op, value in sides[side]().items():
                if block >= 0:
                    found.setdefault(f"{side} {op}", {})[block] = value
        if rank == 0:
            print(f"block {block + 1} of {count}", file=sys.stderr, flush=True)


def report(found: dict[str, dict[int, float]]) -> bool:
    """Prints a table and says whether every ratio passes."""
    load = os.getloadavg()[0]
    print(f"EP{RANKS} gloo, {TOKENS} tokens, H {HIDDEN}, top-{TOPK}; load average {load:.1f}\n")
    print(
        "| ratio | operation | median µs | ratio (95 % interval) | passes |\n|---|---|---|---|---|"
    )
    passed = []
    for a, b in (("nccl_tests", "plain"), ("neutral a", "neutral b")):
        for op in OPS:
            ratio = paired_ratio(found[f"{a} {op}"], found[f"{b} {op}"])
            assert ratio is not None
            values = sorted(found[f"{a} {op}"].values())
            passed.append(passes(ratio))
            words = f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
            middle = values[len(values) // 2]
            print(
                f"| {a} / {b} | {op} | {middle:.1f} | {words} | {'yes' if passed[-1] else 'NO'} |"
            )
    return all(passed)


def passes(ratio: Ratio) -> bool:
    """Whether the interval contains 1 or lies within 5 % of it."""
    assert ratio.low is not None
    assert ratio.high is not None
    contains = ratio.low <= 1 <= ratio.high
    return contains or (ratio.low >= 1 - WITHIN and ratio.high <= 1 + WITHIN)


def rank_main(rank: int, folder: str, count: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    found: dict[str, dict[int, float]] = {}
    blocks(rank, count, found)
    good = report(found) if rank == 0 else True
    dist.destroy_process_group()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=20)
    with TemporaryDirectory() as folder:
        context = mp.start_processes(
            rank_main, (str(Path(folder)), parser.parse_args().blocks), RANKS, join=False,
            start_method="spawn",
        )  # fmt: skip
        assert context is not None
        try:
            while not context.join():
                pass
        except mp.ProcessExitedException as error:
            sys.exit(error.exit_code)
