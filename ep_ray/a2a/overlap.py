"""Work that a rank does between send and receive: a matmul of a given length."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ep_ray.a2a.timing import Timer

SIZE = {"cuda": 2048, "cpu": 128}
"""Rows and columns of one matmul, BF16 on CUDA and float32 on the CPU."""
_TRIES = 20


class Work:
    """As many matmuls as take about `duration_us`, the same number on every rank.

    Collective over `group`: the length of one matmul is measured, and the fastest rank's counts.

    Args:
        duration_us: Length that is asked for, in microseconds.
    """

    def __init__(self, duration_us: float, timer: Timer, group: ProcessGroup) -> None:
        dtype = torch.bfloat16 if timer.device.type == "cuda" else torch.float32
        shape = (SIZE[timer.device.type],) * 2
        self._matrix = torch.ones(shape, dtype=dtype, device=timer.device)
        self._product = torch.empty_like(self._matrix)
        self.count = 1
        self()
        timer.settle()
        self.count = max(1, round(duration_us * 1e3 / self._one_ns(timer, group)))

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def _one_ns(self, timer: Timer, group: ProcessGroup) -> float:
        fastest = torch.tensor([min(self._timed_ns(timer) for _ in range(_TRIES))])
        fastest = fastest.to(timer.device)
        dist.all_reduce(fastest, dist.ReduceOp.MIN, group=group)
        return float(fastest)

    def _timed_ns(self, timer: Timer) -> int:
        stamps = timer.stamps(2)
        timer.pause()
        stamps[0].record()
        self()
        stamps[1].record()
        timer.settle()
        return stamps[1].since_ns(stamps[0])
