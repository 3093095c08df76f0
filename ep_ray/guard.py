"""Ends what a driver leaves behind, whichever way it ends: `guard.py NAME=VALUE`.

A driver that is killed takes the raylet with it, but not what the raylet started: Ray's agents
live on for 40 s and workers that were just starting for 20 s, with the GPU memory and ports that
they hold. The driver starts this process in a session of its own and holds the other end of its
standard input. When that closes, processes whose environment has NAME=VALUE get a moment to
leave, then SIGTERM (which an engine's supervisor answers by ending its engine), then SIGKILL.

Exits with 0 once all are gone, with 1 if some are still there. Standard library only; run with
`-I -S`, to start in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time

LEAVE_S = 1.0
TERM_S = 3.0
KILL_S = 30.0
POLL_S = 0.05


def marked(mark: bytes) -> list[int]:
    """Other processes that still run and whose environment has `mark`."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/environ", "rb") as environ:
                mine = mark in environ.read().split(b"\0")
            with open(f"/proc/{entry}/stat", "rb") as stat:
                state = stat.read().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if mine and state not in b"ZX" and int(entry) != os.getpid():
            found.append(int(entry))
    return found


def _signal(pids: list[int], signum: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except OSError:
            pass


def end(mark: bytes) -> bool:
    """Ends all marked processes. Returns whether they are gone."""
    began = time.monotonic()
    termed: set[int] = set()
    while left := marked(mark):
        age_s = time.monotonic() - began
        if age_s > KILL_S:
            return False
        if age_s > LEAVE_S + TERM_S:
            _signal(left, signal.SIGKILL)
        elif age_s > LEAVE_S:
            _signal([pid for pid in left if pid not in termed], signal.SIGTERM)
            termed.update(left)
        time.sleep(POLL_S)
    return True


def main(mark: str) -> int:
    """Waits for the driver's end, then ends what it left. Returns the exit code."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(0, 1024):
        pass
    return 0 if end(mark.encode()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
