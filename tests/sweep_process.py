"""A sweep in a process of its own, whose processes can be found, hurt and counted.

Every process that descends from the sweep carries a mark in its environment, so that those that
left its session, or lost their parent, are found too.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ep_ray import guard
from serving import ports
from sweeps.store import read_all

_MARK = "EP_RAY_TEST"
DEADLINE_S = 240.0  # for anything that a loaded machine does at last
GONE_S = 20.0  # from the end of the driver to the end of all
POLL_S = 0.1


class SweepProcess:
    """`python -m ep_ray.sweep OVERRIDES` in `folder`, as a session leader, as a shell starts it."""

    def __init__(self, folder: Path, *overrides: str, stdout: int | None = None) -> None:
        self.folder = folder
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._output = folder / f"output-{uuid.uuid4().hex[:6]}.txt"
        name, _, value = self._mark.partition("=")
        env = {**os.environ, name: value, "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}
        with self._output.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ep_ray.sweep", *overrides],
                cwd=folder, env=env, stderr=sink, start_new_session=True,
                stdout=sink if stdout is None else stdout,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def results(self) -> Path:
        """The sweep's folder, once it says where it is."""
        return latest_results(self.folder)

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of every table that are on disk now."""
        return {name: table.to_pylist() for name, table in read_all(self.results).items()}

    def trials(self) -> list[dict[str, Any]]:
        return self.tables()["trials"]

    def pids(self, title: str = "") -> list[int]:
        """The sweep's living processes whose command line has `title` in it."""
        return [pid for pid in guard.marked(self._mark.encode()) if title in command(pid)]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits while the sweep runs; returns what the condition found."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert self._process.poll() is None, f"{what}: the sweep ended\n{self.output}"
            assert time.monotonic() < deadline, f"{what}: never\n{self.output}"
            time.sleep(POLL_S)
        return found

    def until_trials(self, count: int) -> None:
        """Waits until so many attempts of trials are on disk."""
        self.until(lambda: "results in" in self.output, "start of the sweep")
        self.until(lambda: len(self.trials()) >= count, f"{count} trials")

    def signal(self, signum: int, group: bool = False) -> None:
        """Signals the driver, or all of its process group, as a terminal does."""
        (os.killpg if group else os.kill)(self._process.pid, signum)

    def wait(self) -> int:
        """The exit code; asserts that there is one before a generous deadline."""
        try:
            return self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the sweep does not end\n{self.output}") from None

    def assert_nothing_left(self, within_s: float = 0.0) -> None:
        """All processes are gone: at once where the driver ended itself."""
        deadline = time.monotonic() + within_s
        while left := self.pids():
            if time.monotonic() > deadline:
                raise AssertionError(f"left: {[command(p) for p in left]}\n{self.output}")
            time.sleep(POLL_S)

    def destroy(self) -> None:
        """Kills whatever is left; for the end of a test, good or bad."""
        deadline = time.monotonic() + GONE_S
        while (left := self.pids()) and time.monotonic() < deadline:
            kill(left, signal.SIGKILL)
            time.sleep(POLL_S)
        self._process.wait(GONE_S)


def latest_results(folder: Path) -> Path:
    return max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def kill(pids: list[int], signum: int) -> None:
    """Signals processes; there must be some to hurt."""
    assert pids
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            pass


def counts(rows: list[dict[str, Any]], column: str) -> dict[Any, int]:
    return dict(Counter(row[column] for row in rows))


def free_ports() -> int:
    """First of 100 ports in a row that nobody uses now, for several runs share a machine."""
    for _ in range(200):
        base = random.randrange(21000, 31000, 100)
        if all(map(ports.is_free, range(base, base + 100))):
            return base
    raise RuntimeError("no 100 free ports in a row between 21000 and 31000")
