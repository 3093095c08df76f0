"""Readings of the hardware while a trial is measured, and what they say against its numbers.

One sampler per machine runs in a process of its own, so that no reading is taken on a thread
that measures. It reads at the start, every second, and at the end.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ep_ray.counters import growth, read_counters
from ep_ray.nvml import Nvml, open_nvml, reason_words
from ep_ray.topology import read_topology

PERIOD_S = 1.0
CLOCK_CHANGE = 0.05
"""Share by which the SM clock may change within a trial before the trial is tagged."""


@dataclass(frozen=True)
class Reading:
    """One value at one moment; a row of the `telemetry` table.

    Attributes:
        unix_ns: When it was read.
        node: Hostname.
        source: `gpu0`, `cpu`, or a port such as `net/eth0`.
        name: What it is, with its unit.
        value: The value.
    """

    unix_ns: int
    node: str
    source: str
    name: str
    value: float


@dataclass(frozen=True)
class Watched:
    """What a sampler brings back about one trial.

    Attributes:
        readings: In the order of time.
        grown: How many bytes each port's counters grew by; see `ep_ray.counters`.
    """

    readings: list[Reading]
    grown: dict[str, int]


class Sampler:
    """Watches this machine between `begin` and `end`."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._nvml: Nvml | None = open_nvml()
        self._node = socket.gethostname()
        self._readings: list[Reading] = []
        self._before: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def topology(self) -> dict[str, dict[str, str]]:
        """Links between the GPUs and NICs of this machine."""
        return read_topology()

    def held(self) -> tuple[str, list[tuple[str, float, int]]]:
        """This machine's name, and what its GPUs hold now; see `Nvml.held`."""
        return self._node, self._nvml.held() if self._nvml else []

    def begin(self) -> None:
        """Starts to watch; a watch that was never ended is dropped."""
        self._halt()
        self._readings = []
        self._before = self._counters()
        self._sample()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._stop,), daemon=True)
        self._thread.start()

    def end(self) -> Watched:
        """Ends the watch. Counters are read before anything else."""
        after = self._counters()
        self._halt()
        self._sample()
        return Watched(self._readings, growth(self._before, after))

    def _halt(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._period_s):
            self._sample()

    def _counters(self) -> dict[str, int]:
        return read_counters() | (self._nvml.nvlink_bytes() if self._nvml else {})

    def _sample(self) -> None:
        now = time.time_ns()
        gpus = self._nvml.readings() if self._nvml else ()
        values = [*gpus, ("cpu", "load_1min", os.getloadavg()[0])]
        for counter, count in self._counters().items():
            port, _, word = counter.rpartition("/")
            values.append((port, word, float(count)))
        self._readings += [Reading(now, self._node, *value) for value in values]


def tags(readings: Sequence[Reading]) -> list[str]:
    """What speaks against a trial's numbers, in words; empty where nothing does.

    A GPU is tagged when the driver held its clocks down at any reading, or when its SM clock
    changed by more than 5 % between readings at which it worked. Its first reading at work is
    left out: clocks that rise from idle are no throttling.
    """
    found: list[str] = []
    for node, gpu in sorted({(r.node, r.source) for r in readings if r.name == "sm_clock_mhz"}):
        mine = [r for r in readings if (r.node, r.source) == (node, gpu)]
        bits = 0
        for reading in mine:
            bits |= int(reading.value) if reading.name == "throttle_reasons" else 0
        found += [f"throttled: {word} on {node} {gpu}" for word in reason_words(bits)]
        clocks = _clocks_at_work(mine)
        if clocks and min(clocks) < (1 - CLOCK_CHANGE) * max(clocks):
            change = f"{max(clocks):.0f} to {min(clocks):.0f} MHz"
            found.append(f"sm_clock_changed: {change} on {node} {gpu}")
    return found


def _clocks_at_work(readings: Sequence[Reading]) -> list[float]:
    busy = {r.unix_ns for r in readings if r.name == "utilisation_pct" and r.value > 0}
    return [r.value for r in readings if r.name == "sm_clock_mhz" and r.unix_ns in busy][1:]
