"""One timing: flush, barrier over ranks, spin, start, operation, end. Nothing is subtracted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

WINDOW = 20
"""Iterations in each of the two windows whose medians decide when warm-up ends."""
SPIN_NS = 1_000_000
"""CPU: from the last rank's arrival at the barrier to the common start."""
SPIN_CYCLES = 400_000
"""CUDA: about 0.2 ms in which the device waits while the host launches the operation."""

Operation = Callable[[], object]


class Timer(Protocol):
    """Times one operation on one rank; collective over `group`."""

    group: ProcessGroup
    device: torch.device
    rank: int

    def time_ns(self, operation: Operation) -> int:
        """Aligns the ranks, runs `operation`, returns its duration."""


class CpuTimer:
    """Host clock.

    Ranks of one host share CLOCK_MONOTONIC: they agree on the latest of their proposed start
    times, which is also the barrier, and each waits for it. A rank that the scheduler wakes
    late starts late; its peers wait for it within the clock, as they would in a model.
    Over several hosts clocks differ: each rank then waits a fixed time after a barrier.
    """

    def __init__(self, group: ProcessGroup, shared_clock: bool) -> None:
        self.group, self.shared_clock = group, shared_clock
        self.device, self.rank = torch.device("cpu"), dist.get_rank(group)

    def time_ns(self, operation: Operation) -> int:
        self._wait_for_common_start()
        start = time.perf_counter_ns()
        operation()
        return time.perf_counter_ns() - start

    def _wait_for_common_start(self) -> None:
        start = torch.tensor([time.perf_counter_ns() + SPIN_NS])
        dist.all_reduce(start, dist.ReduceOp.MAX, group=self.group)
        until = int(start) if self.shared_clock else time.perf_counter_ns() + SPIN_NS
        while time.perf_counter_ns() < until:
            # Yields the core: with more ranks than cores a bare spin would hold up its peers.
            os.sched_yield()


class CudaTimer:
    """CUDA events on the current stream; the host waits only after the end event.

    The barrier is an all-reduce on the device, so that it orders streams rather than hosts.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.rank = group, device, dist.get_rank(group)
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        self._one = torch.ones(1, device=device)
        self._start, self._end = _event(), _event()

    def time_ns(self, operation: Operation) -> int:
        self._flush.zero_()
        dist.all_reduce(self._one, dist.ReduceOp.MAX, group=self.group)
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
        self._start.record()
        operation()
        self._end.record()
        self._end.synchronize()
        elapsed_ms: float = self._start.elapsed_time(self._end)
        return round(elapsed_ms * 1e6)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_timer(group: ProcessGroup, device: torch.device, shared_clock: bool) -> Timer:
    """The timer for `device`; `shared_clock` says whether all ranks run on one host."""
    if device.type == "cuda":
        return CudaTimer(group, device)
    return CpuTimer(group, shared_clock)


@dataclass(frozen=True)
class Warmup:
    """When warm-up ends.

    Attributes:
        least: Fewest iterations.
        most: Most iterations.
        tolerance: Largest relative difference of the medians of two windows of 20.
    """

    least: int
    most: int
    tolerance: float


def settled(durations_ns: list[int], tolerance: float) -> bool:
    """Whether the median of the last 20 is within `tolerance` of that of the 20 before; pure."""
    if len(durations_ns) < 2 * WINDOW:
        return False
    before = median(durations_ns[-2 * WINDOW : -WINDOW])
    return abs(median(durations_ns[-WINDOW:]) - before) <= tolerance * before


def warm_up(time_one: Callable[[int], int], rule: Warmup, timer: Timer) -> list[int]:
    """Runs `time_one(iteration)` until `rule` is met; returns this rank's durations, ns.

    Ranks compare the slowest rank's durations, which all have, so all stop together.
    The collective that spreads them runs once per window.
    """
    mine: list[int] = []
    slowest: list[int] = []
    while len(mine) < rule.most:
        window = [time_one(len(mine) + i) for i in range(min(WINDOW, rule.most - len(mine)))]
        mine += window
        spread = torch.tensor(window, device=timer.device)
        dist.all_reduce(spread, dist.ReduceOp.MAX, group=timer.group)
        slowest += spread.tolist()
        if len(mine) >= rule.least and settled(slowest, rule.tolerance):
            break
    return mine
