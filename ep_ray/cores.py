"""Which cores of this machine processes take that must not disturb one another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_SYSFS = Path("/sys/devices/system/cpu")


def apart(cores: Sequence[int], sysfs: Path = _SYSFS) -> list[int]:
    """The same cores, in an order in which hardware threads of one core come as late as they can.

    Args:
        cores: Logical cores, for example `os.sched_getaffinity(0)`.
        sysfs: Where Linux says which of them share a core.
    """
    seen: dict[str, int] = {}
    ranked = []
    for core in sorted(cores):
        try:
            shared = (sysfs / f"cpu{core}/topology/thread_siblings_list").read_text().strip()
        except OSError:  # not told: taken for a core of its own
            shared = str(core)
        ranked.append((seen.get(shared, 0), core))
        seen[shared] = seen.get(shared, 0) + 1
    return [core for _, core in sorted(ranked)]


def usable() -> int:
    """Logical cores that this process, and what it starts, may run on."""
    return len(os.sched_getaffinity(0))


def seats(count: int, cores: Sequence[int] | None = None) -> list[int]:
    """A core for each of `count` processes; where there are too few, the last ones share one.

    The first process never shares while there are two cores: it is the one that must not wait.

    Args:
        count: Processes.
        cores: What `apart` gave; None asks this machine.
    """
    order = apart(sorted(os.sched_getaffinity(0))) if cores is None else list(cores)
    return [order[min(place, len(order) - 1)] for place in range(count)]


def keep_to(_actor: object, core: int | None, *more: int) -> int:
    """Keeps every thread of this process on `core` where one is given, and `more` beside it.

    Returns the process id.

    Takes what Ray's `__ray_call__` passes first, so that an actor can be sent it.
    """
    if core is not None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {core, *more})
    return os.getpid()
