"""Nothing of a server survives: real process trees that fork, change session and ignore signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving.engine_process import ServerProcess, first_error, session_pids

# A server with a child that moves to a session of its own and a grandchild that ignores SIGTERM.
TREE = """
import os, signal, subprocess, sys, time
leaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
own = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {leaf!r}])"
a = subprocess.Popen([sys.executable, "-c", own], start_new_session=True)
b = subprocess.Popen([sys.executable, "-c", leaf])
print("children", a.pid, b.pid, flush=True)
time.sleep(600)
"""
# Holds a ServerProcess as an actor would, says where it is, and waits to be killed.
OWNER = """
import os, sys, time
from pathlib import Path
from serving.engine_process import first_error, ServerProcess
server = ServerProcess(["-c", sys.argv[1]], os.environ, Path(sys.argv[2]))
print(server.session, flush=True)
time.sleep(600)
"""
DEADLINE_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def tree_pids(server: ServerProcess) -> list[int]:
    """The server and its two children, once they run, and the one in another session's child."""
    until(lambda: "children" in server.tail(5))
    other, same = map(int, server.tail(5).rpartition("children")[2].split()[:2])
    children = Path(f"/proc/{other}/task/{other}/children")
    until(lambda: bool(children.read_text().split()))
    return [server.pid, other, same, *map(int, children.read_text().split())]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(["-c", TREE], os.environ, tmp_path / "log" / "server.log")
    yield process
    assert process.kill(DEADLINE_S) == []


def test_stop_kills_what_ignores_sigterm_or_left_the_session(server: ServerProcess) -> None:
    pids = tree_pids(server)
    assert server.exit_code() is None
    assert server.stop(grace_s=0.5) == []
    assert all(map(is_gone, pids))
    assert session_pids(server.session) == []


def test_death_of_the_server_takes_its_children_along(server: ServerProcess) -> None:
    pids = tree_pids(server)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: server.exit_code() is not None)
    assert server.exit_code() == 128 + signal.SIGKILL
    assert all(map(is_gone, pids))


def test_stopped_processes_are_killed_too(server: ServerProcess) -> None:
    pids = tree_pids(server)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert server.stop(grace_s=0.2) == []
    assert all(map(is_gone, pids))


def test_death_of_the_supervisor_leaves_nothing_of_the_session(server: ServerProcess) -> None:
    pids = tree_pids(server)
    os.kill(server.session, signal.SIGKILL)
    until(lambda: is_gone(server.pid))
    assert server.exit_code() == 128 + signal.SIGKILL
    assert server.kill(DEADLINE_S) == []
    assert session_pids(server.session) == []
    os.kill(pids[1], signal.SIGKILL)  # in a session of its own: out of reach by design
    os.kill(pids[3], signal.SIGKILL)


def test_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, TREE, str(log)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    session = int(owner.stdout.readline())
    until(lambda: log.is_file() and "children" in log.read_text())
    pids = [*session_pids(session), *map(int, log.read_text().split()[1:])]
    assert len(pids) >= 4
    owner.kill()
    owner.wait(DEADLINE_S)
    until(lambda: all(map(is_gone, pids)))


def test_exit_code_log_environment_and_command(tmp_path: Path) -> None:
    code = "import sys, time; print('out'); print('err', file=sys.stderr); sys.stdin.read(); "
    env = os.environ | {"VLLM_SHOWN": "1", "NCCL_SHOWN": "2", "HIDDEN": "3"}
    log = tmp_path / "server.log"
    alive = ServerProcess(["-c", "import time; time.sleep(600)"], env, log)
    until(lambda: alive.command()[1:2] == ["-c"])
    shown = alive.environment()
    assert (shown["VLLM_SHOWN"], shown["NCCL_SHOWN"]) == ("1", "2")
    assert "HIDDEN" not in shown
    assert alive.stop(5.0) == []
    ended = ServerProcess(["-c", code + "sys.exit(3)"], env, log)
    until(lambda: ended.exit_code() is not None)
    assert ended.exit_code() == 3
    assert {"out", "err"} <= set(ended.tail(10).split())
    assert ended.kill(5.0) == []


def test_shared_memory_that_a_server_leaves_is_removed(tmp_path: Path) -> None:
    name = Path("/dev/shm") / f"ep ray test {os.getpid()}"
    code = f"""
import mmap, time
file = open({str(name)!r}, "w+b"); file.truncate(4096)
area = mmap.mmap(file.fileno(), 4096); print("mapped", flush=True); time.sleep(600)
"""
    server = ServerProcess(["-c", code], os.environ, tmp_path / "server.log")
    until(lambda: "mapped" in server.tail(5))
    assert server.stop(5.0) == []
    assert not name.exists()


def test_first_error_is_the_cause_not_its_consequences(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        "(APIServer pid=1) INFO 11-30 23:01:21 [api_server.py:1] error handling is on\n"
        "(EngineCore pid=2) ERROR 11-30 [core.py:1231] Traceback (most recent call last):\n"
        "(EngineCore pid=2) ERROR 11-30 [core.py:1231] ModuleNotFoundError: No module named 'x'\n"
        "(APIServer pid=1) RuntimeError: Engine core initialization failed.\n"
    )
    assert first_error(log) == "ModuleNotFoundError: No module named 'x'"
    assert first_error(tmp_path / "none.log") == ""
