"""One timing: flush, barrier over ranks, spin, start, operation, end. Nothing is subtracted."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol, Self, cast

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


class Stamp(Protocol):
    """A point in time, of the host or of the current stream."""

    def record(self) -> None:
        """Marks now."""

    def since_ns(self, earlier: Self) -> int:
        """Time from `earlier`; both must have happened, see `Timer.settle`."""


class HostStamp:
    """A reading of the host's clock."""

    def __init__(self) -> None:
        self.at_ns = 0

    def record(self) -> None:
        self.at_ns = time.perf_counter_ns()

    def since_ns(self, earlier: HostStamp) -> int:
        return self.at_ns - earlier.at_ns


class DeviceStamp:
    """A CUDA event."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record()

    def since_ns(self, earlier: DeviceStamp) -> int:
        elapsed_ms: float = earlier._event.elapsed_time(self._event)
        return round(elapsed_ms * 1e6)


class Timer(ABC):
    """Times operations on one rank; collective over `group`."""

    group: ProcessGroup
    device: torch.device
    rank: int

    @abstractmethod
    def stamps(self, count: int) -> list[Stamp]:
        """Stamps that are not recorded yet."""

    @abstractmethod
    def flush(self) -> None:
        """Empties the device's cache."""

    @abstractmethod
    def pause(self) -> None:
        """A short wait of the device."""

    @abstractmethod
    def align(self) -> None:
        """Flush, barrier over ranks and spin, so that all ranks start together."""

    @abstractmethod
    def settle(self) -> None:
        """Waits until everything that was launched has happened."""

    def time_ns(self, *stages: Operation) -> list[int]:
        """Aligns the ranks, runs the stages one after another, returns each one's duration."""
        stamps = self.stamps(len(stages) + 1)
        self.align()
        stamps[0].record()
        for stage, stamp in zip(stages, stamps[1:], strict=True):
            stage()
            stamp.record()
        self.settle()
        return spans_ns(stamps)


def spans_ns(stamps: Sequence[Stamp]) -> list[int]:
    """Durations between consecutive stamps."""
    return [later.since_ns(earlier) for earlier, later in pairwise(stamps)]


class CpuTimer(Timer):
    """Host clock.

    Ranks of one host share CLOCK_MONOTONIC: they agree on the latest of their proposed start
    times, which is also the barrier, and each waits for it. A rank that the scheduler wakes
    late starts late; its peers wait for it within the clock, as they would in a model.
    Over several hosts clocks differ: each rank then waits a fixed time after a barrier.
    """

    def __init__(self, group: ProcessGroup, shared_clock: bool) -> None:
        self.group, self.shared_clock = group, shared_clock
        self.device, self.rank = torch.device("cpu"), dist.get_rank(group)

    def stamps(self, count: int) -> list[Stamp]:
        return [HostStamp() for _ in range(count)]

    def flush(self) -> None:
        """Nothing: its caches are the host's, and the host is in use all the time."""

    def pause(self) -> None:
        time.sleep(SPIN_NS / 1e9)

    def settle(self) -> None:
        """Nothing: an operation has ended when it returns."""

    def align(self) -> None:
        start = torch.tensor([time.perf_counter_ns() + SPIN_NS])
        dist.all_reduce(start, dist.ReduceOp.MAX, group=self.group)
        until = int(start) if self.shared_clock else time.perf_counter_ns() + SPIN_NS
        while time.perf_counter_ns() < until:
            # Yields the core: with more ranks than cores a bare spin would hold up its peers.
            os.sched_yield()


class CudaTimer(Timer):
    """CUDA events on the current stream; the host waits only after the end event.

    The barrier is an all-reduce on the device, so that it orders streams rather than hosts.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.rank = group, device, dist.get_rank(group)
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        self._one = torch.ones(1, device=device)
        self._kept: list[DeviceStamp] = []

    def stamps(self, count: int) -> list[Stamp]:
        # Kept, because making events costs the host time while the device spins.
        self._kept += [DeviceStamp() for _ in range(count - len(self._kept))]
        return cast(list[Stamp], self._kept[:count])

    def flush(self) -> None:
        self._flush.zero_()

    def pause(self) -> None:
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def align(self) -> None:
        self.flush()
        dist.all_reduce(self._one, dist.ReduceOp.MAX, group=self.group)
        self.pause()


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


def warm_up(time_one: Callable[[int], list[int]], rule: Warmup, timer: Timer) -> list[list[int]]:
    """Runs `time_one(iteration)` until `rule` is met; returns this rank's durations, ns.

    Ranks compare the slowest rank's durations (of all stages together), which all have, so all
    stop together. The collective that spreads them runs once per window.
    """
    mine: list[list[int]] = []
    slowest: list[int] = []
    while len(mine) < rule.most:
        window = [time_one(len(mine) + i) for i in range(min(WINDOW, rule.most - len(mine)))]
        mine += window
        spread = torch.tensor([sum(stages) for stages in window], device=timer.device)
        dist.all_reduce(spread, dist.ReduceOp.MAX, group=timer.group)
        slowest += spread.tolist()
        if len(mine) >= rule.least and settled(slowest, rule.tolerance):
            break
    return mine
