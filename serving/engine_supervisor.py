"""Runs one server and guarantees that nothing of it survives: `engine_supervisor.py ARGV...`.

vLLM's server starts an engine core and workers, and they outlive a server that is killed.
This process is their nearest subreaper, so every descendant stays visible to it. It kills them
all when the server ends, when it is told to (SIGTERM, SIGHUP), or when its standard input
closes. Only the engine's actor holds the other end, so the input closes whichever way the
actor dies. A parent-death signal alone would not do: it fires when the *thread* that started
the child ends, and Ray runs an actor's methods in threads that come and go.

It detaches from its parent first: Ray kills a dead worker's direct children with SIGKILL
(`kill_child_processes_on_worker_exit`), and a killed supervisor supervises nothing.

Standard output carries `started SUPERVISOR SERVER` (two pids) and, at the end, `exit CODE`: the
server's own code (128 + signal if it was killed), or 70 if something could not be killed. The
server logs to standard error. Standard library only; run with `-I -S`, to start in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1
KILL_DEADLINE_S = 60.0
TRACKER_GRACE_S = 2.0
TRACKER = b"multiprocessing.resource_tracker"
NOT_KILLED = 70

_told_to_stop = False


def _stop(signum: int, frame: FrameType | None) -> None:
    global _told_to_stop
    _told_to_stop = True


def _exec_server(argv: list[str], parent: int) -> None:
    """Becomes the server; dies with the supervisor even if that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error}\n".encode())
        os._exit(127)


def _parents() -> dict[int, int]:
    """pid -> parent's pid of every process that is visible and not a zombie."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(entry)] = int(parent)
    return parents


def _descendants(root: int) -> list[int]:
    parents = _parents()
    found, frontier = [], {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found += sorted(frontier)
    return found


def _reap(server: int) -> int | None:
    """Collects ended children, adopted ones too. Returns the server's exit code if it ended."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == server:
            code = os.waitstatus_to_exitcode(status)


def _is_tracker(pid: int) -> bool:
    """Python's resource trackers remove leaked shared memory once their owners are gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return TRACKER in command.read()
    except OSError:
        return False


def _kill_all(server: int) -> tuple[bool, int | None]:
    """Kills every descendant. Returns whether all are gone, and the server's code if reaped."""
    code = None
    began = time.monotonic()
    while time.monotonic() < began + KILL_DEADLINE_S:
        victims = _descendants(os.getpid())
        spare = time.monotonic() < began + TRACKER_GRACE_S
        for pid in victims:
            if spare and _is_tracker(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        reaped = _reap(server)
        code = code if reaped is None else reaped
        if not victims:
            return True, code
        time.sleep(0.01)
    return False, code


def _watch(server: int) -> int | None:
    """Waits for the server's end (returns its code) or for a reason to end it (None)."""
    while not _told_to_stop:
        code = _reap(server)
        if code is not None:
            return code
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable and not os.read(0, 1024):
            return None
    return None


def main(argv: list[str]) -> int:
    """Leaves a supervisor behind that starts `argv`, watches it and ends what it started."""
    if os.fork():
        return 0
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a Ray thread may have blocked some
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    me = os.getpid()
    server = os.fork()
    if server == 0:
        _exec_server(argv, me)
    _tell(f"started {me} {server}")
    code = _watch(server)
    gone, late = _kill_all(server)
    _tell(f"exit {_exit_code(code if code is not None else late) if gone else NOT_KILLED}")
    return 0


def _exit_code(code: int | None) -> int:
    if code is None:  # it ended unseen
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


def _tell(line: str) -> None:
    try:
        os.write(1, f"{line}\n".encode())
    except OSError:  # the actor is gone
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
