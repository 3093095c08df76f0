"""A server process under its supervisor: start, watch, end, and look for what is left."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SUPERVISOR = Path(__file__).with_name("engine_supervisor.py")
SPAWN_TIMEOUT_S = 30.0
SHOWN_ENV = ("NCCL_", "FI_", "UCX_", "GLOO_", "VLLM_")


class ServerProcess:
    """One server, its supervisor and its log. Safe to use from several threads.

    Attributes:
        pid: The server's pid.
        session: The supervisor's pid, which names the session of all its processes.
        log: Where the server's output goes.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        program: str = sys.executable,
    ) -> None:
        """Starts `PROGRAM ARGV`, by default a Python, with exactly this environment.

        Its output is appended to `log`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._lock = threading.Lock()
        self._exit_code: int | None = None
        command = [sys.executable, "-I", "-S", str(SUPERVISOR), program, *argv]
        with log.open("ab") as sink:
            launcher = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, env=dict(env)
            )
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        self._lifeline, self._status = launcher.stdin, launcher.stdout
        launcher.wait(SPAWN_TIMEOUT_S)  # the supervisor has detached
        word, *pids = self._read_line(SPAWN_TIMEOUT_S).split() or [""]
        if word != "started":
            self._lifeline.close()
            raise RuntimeError(
                f"the supervisor of {program} did not start; its log:\n{self.tail(20)}"
            )
        self.session, self.pid = map(int, pids)

    def _read_line(self, timeout_s: float) -> str:
        """The supervisor's next line; empty if it is gone, or silent until the deadline."""
        ready, _, _ = select.select([self._status], [], [], timeout_s)
        return self._status.readline().decode() if ready else ""

    def exit_code(self) -> int | None:
        """None while the server runs; else its exit code, 128 + signal if it was killed."""
        with self._lock:
            if self._exit_code is None and select.select([self._status], [], [], 0)[0]:
                word, _, code = self._status.readline().decode().partition(" ")
                # Without a last word the supervisor was killed, and the server with it.
                self._exit_code = int(code) if word == "exit" else 128 + signal.SIGKILL
            return self._exit_code

    def stop(self, grace_s: float, kill_s: float = 15.0) -> list[int]:
        """Ends the server: SIGTERM, `grace_s` to leave, then SIGKILL to all. Returns leftovers.

        Shared memory files are removed too: vLLM's CPU communicator leaves 4 MiB per worker
        behind even when it ends in order, and a container's /dev/shm is small.
        """
        files = shared_memory_files(self.session)
        if self.exit_code() is None:
            try:
                os.kill(self.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
            self._wait(grace_s)
        left = self.kill(kill_s)
        if not left:
            for file in files:
                file.unlink(missing_ok=True)
        return left

    def kill(self, timeout_s: float) -> list[int]:
        """Kills everything at once. Returns the pids that are still there at the deadline."""
        self._lifeline.close()  # the supervisor kills its descendants and leaves
        self._wait(timeout_s)
        return kill_session(self.session, timeout_s)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def tail(self, lines: int) -> str:
        """The last lines of the log."""
        return tail(self.log, lines)

    def environment(self) -> dict[str, str]:
        """Variables that the server really started with and that bear on communication."""
        raw = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace")
        pairs = (item.partition("=") for item in raw.split("\0") if item)
        return {key: value for key, _, value in pairs if key.startswith(SHOWN_ENV)}

    def command(self) -> list[str]:
        raw = Path(f"/proc/{self.pid}/cmdline").read_bytes().decode(errors="replace")
        return raw.split("\0")[:-1]


def tail(log: Path, lines: int) -> str:
    """The last lines of a file; empty if it does not exist. Reads at most 256 KiB."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 256 * 1024))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


# One line of a log that names an exception, after vLLM's prefixes; its group is the exception.
RAISED = re.compile(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?((?:[\w.]+)?(?:Error|Exception): .+)$")


def first_error(log: Path, begin: int = 0) -> str:
    """The first exception that a log names: the cause, where later ones are its consequences.

    Args:
        log: The file; it need not exist.
        begin: Bytes to skip, of earlier starts.
    """
    lines = lines_from(log, begin)
    return next((found[1] for line in lines if (found := RAISED.match(line.rstrip()))), "")


def lines_from(log: Path, begin: int) -> Iterator[str]:
    """Lines of a log after its first `begin` bytes; none if it does not exist."""
    if log.is_file():
        with log.open("rb") as file:
            file.seek(begin)
            yield from (line.decode(errors="replace") for line in file)


def session_pids(session: int) -> list[int]:
    """Processes of a session on this machine that still run (zombies do not)."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
        except OSError:
            continue
        state, _parent, _group, of_session = stat.rpartition(")")[2].split()[:4]
        if int(of_session) == session and state not in "ZX":
            found.append(int(entry))
    return sorted(found)


def shared_memory_files(session: int) -> set[Path]:
    """Files in /dev/shm that processes of a session have mapped."""
    files = set()
    for pid in session_pids(session):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            continue
        names = (line.split(maxsplit=5)[5] for line in maps.splitlines() if " /dev/shm/" in line)
        files |= {Path(name) for name in names if not name.endswith(" (deleted)")}
    return files


def kill_session(session: int, timeout_s: float) -> list[int]:
    """Kills what is left of a session. Returns the pids that are still there at the deadline."""
    deadline = time.monotonic() + timeout_s
    while left := session_pids(session):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left
