"""What a killed driver leaves is ended: real processes that ignore signals and change session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from ep_ray import guard

DEADLINE_S = 30.0
# Starts the guard as a session does, and two processes: one obeys nobody, one has no mark.
DRIVER = """
import os, subprocess, sys, time
mark, guard = sys.argv[1:]
subprocess.Popen([sys.executable, "-I", "-S", guard, mark], stdin=subprocess.PIPE,
                 start_new_session=True)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
name, _, value = mark.partition("=")
env = os.environ | {name: value}
subprocess.Popen([sys.executable, "-c", deaf], env=env, start_new_session=True)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(other.pid, flush=True)
time.sleep(600)
"""


def test_marked_processes_of_a_killed_driver_end_and_others_live() -> None:
    mark = f"EP_RAY_GUARD_TEST={uuid.uuid4().hex}"
    command = [sys.executable, "-c", DRIVER, mark, guard.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        other = int(driver.stdout.readline())
        try:
            until(lambda: len(guard.marked(mark.encode())) == 1)
            driver.kill()
            until(lambda: not guard.marked(mark.encode()))
            stat = Path(f"/proc/{other}/stat").read_text()
            assert stat.rpartition(")")[2].split()[0] not in "ZX"
        finally:
            driver.kill()
            os.kill(other, signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.05)
