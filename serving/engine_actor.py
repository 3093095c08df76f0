"""The Ray actor that owns one engine: its server lives and dies with it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from serving import engine_http
from serving.engine import Launch
from serving.engine_http import Counters
from serving.engine_process import ServerProcess, first_error, lines_from, tail
from serving.models import ensure_here
from serving.port_race import RankAtStart, port_signs
from serving.ports import check_free

POLL_S = 0.25
TAIL_LINES = 40


class EngineError(RuntimeError):
    """An engine did not start, did not become ready, or died; carries the end of its log."""


class EngineTimeoutError(EngineError):
    """An engine that runs, but missed a deadline."""


@dataclass(frozen=True)
class Started:
    """Where an engine runs, for those who must check later that it is gone.

    Attributes:
        node_id: Ray's id of the node.
        pid: The server's pid.
        session: Session of the server and all its processes.
        log: Path of its log on that node.
    """

    node_id: str
    pid: int
    session: int
    log: str


@dataclass(frozen=True)
class EngineFacts:
    """What really ran, for the results.

    Attributes:
        name: The engine's name.
        pid: The server's pid.
        port: Its port.
        vllm_version: As the server reports it.
        environment: NCCL_, FI_, UCX_, GLOO_ and VLLM_ variables that the server started with.
        command: Its command line.
        health_s: Start to `/health`, seconds.
        startup_s: Start to the first generated token, seconds.
    """

    name: str
    pid: int
    port: int
    vllm_version: str
    environment: dict[str, str]
    command: list[str]
    health_s: float
    startup_s: float


class EngineRank:
    """One engine. Needs `max_concurrency` of 2 or more, so that it answers while it waits."""

    def __init__(self, launch: Launch, log_dir: str) -> None:
        self._launch = launch
        self._log = Path(log_dir) / (launch.name.replace(":", "-") + ".log")
        self._server: ServerProcess | None = None
        self._log_begin = 0  # where this start's lines begin: earlier ones wrote there too
        self._started_s = self._health_s = self._startup_s = 0.0

    def __repr__(self) -> str:
        return self._launch.name  # Ray shows it in the dashboard and before log lines

    def start(self) -> Started:
        """Starts the server and returns at once.

        Raises:
            PortError: A port is taken.
            ModelError: The model is not on this node.
        """
        check_free(self._launch.claims)
        ensure_here(self._launch.model)
        self._log_begin = self._log.stat().st_size if self._log.is_file() else 0
        self._started_s = time.monotonic()
        env = {**os.environ, **_without_flashinfer(), **self._launch.env}
        self._server = ServerProcess(self._launch.argv, env, self._log)
        return Started(_node_id(), self._server.pid, self._server.session, str(self._log))

    def ready(self, timeout_s: float) -> float:
        """Waits for `/health`, then for one generated token. Returns seconds since the start.

        A hung collective leaves `/health` at 200, so only a token proves that a rank serves.

        Raises:
            EngineTimeoutError: The deadline passed.
            EngineError: It died, or answered with an error.
        """
        deadline = time.monotonic() + timeout_s
        while not engine_http.is_healthy(self._launch.url):
            self._raise_if_dead()
            if time.monotonic() > deadline:
                what = f"is not healthy after {timeout_s:.0f} s (arm.startup_timeout_s)"
                raise self._error(what, EngineTimeoutError)
            time.sleep(POLL_S)
        self._health_s = time.monotonic() - self._started_s
        self.serve_one_token(max(1.0, deadline - time.monotonic()))
        self._startup_s = time.monotonic() - self._started_s
        return self._startup_s

    def serve_one_token(self, timeout_s: float) -> int:
        """Proves that the engine serves; nanoseconds from the request to its one token.

        Raises:
            EngineTimeoutError: No token came within `timeout_s`.
            EngineError: It died, or answered with an error.
        """
        asked_ns = time.monotonic_ns()
        try:
            engine_http.generate_one_token(
                self._launch.url, self._launch.model.name, _plain_token(self._launch), timeout_s
            )
            return time.monotonic_ns() - asked_ns
        except (OSError, ValueError) as error:
            self._raise_if_dead()
            late = isinstance(getattr(error, "reason", error), TimeoutError)
            kind = EngineTimeoutError if late else EngineError
            raise self._error(f"is healthy, but gave no token: {error}", kind) from None

    def check(self) -> str | None:
        """None while the server runs; else why it does not, with the end of its log."""
        try:
            self._raise_if_dead()
        except EngineError as error:
            return str(error)
        return None

    def at_start(self) -> RankAtStart:
        """How far its start-up came, and what its log says of ports; never raises."""
        code = None if self._server is None else self._server.exit_code()
        healthy = code is None and engine_http.is_healthy(self._launch.url)
        signs = port_signs(lines_from(self._log, self._log_begin))
        return RankAtStart(self._launch.name, code, healthy, signs)

    def facts(self) -> EngineFacts:
        server = self._running()
        version = engine_http.get(f"{self._launch.url}/version", 10.0)
        return EngineFacts(
            name=self._launch.name,
            pid=server.pid,
            port=self._launch.port,
            vllm_version=version.partition('"version":"')[2].partition('"')[0] or version,
            environment=server.environment(),
            command=server.command(),
            health_s=self._health_s,
            startup_s=self._startup_s,
        )

    def counters(self) -> Counters:
        self._raise_if_dead()
        return engine_http.counters(self._launch.url)

    def stable_counters(self, timeout_s: float) -> Counters:
        """Counters of the idle engine. Raises TimeoutError if they still move at the deadline."""
        return engine_http.stable_counters(self.counters, timeout_s)

    def stop(self, grace_s: float) -> list[int]:
        """Ends the server and everything that it started. Returns pids that would not die."""
        return [] if self._server is None else self._server.stop(grace_s)

    def nccl_lines(self) -> list[str]:
        """What NCCL wrote into the server's log: versions, environment and channels."""
        if not self._log.is_file():
            return []
        with self._log.open(errors="replace") as log:
            return [line.rstrip() for line in log if "NCCL" in line]

    def log_tail(self, lines: int) -> str:
        return tail(self._log, lines)

    def _running(self) -> ServerProcess:
        self._raise_if_dead()
        assert self._server is not None
        return self._server

    def _raise_if_dead(self) -> None:
        if self._server is None:
            raise EngineError(f"{self._launch.name} was not started")
        code = self._server.exit_code()
        if code is not None:
            raise self._error(f"ended with exit code {code}" + _signal_hint(code))

    def _error(self, what: str, kind: type[EngineError] = EngineError) -> EngineError:
        log, cause = tail(self._log, TAIL_LINES), first_error(self._log, self._log_begin)
        said = f"; its log's first error: {cause}" if cause else ""
        return kind(f"{self._launch.name} {what}{said}\nThe end of {self._log}:\n{log}")


def _without_flashinfer() -> dict[str, str]:
    # vLLM 0.24 asks flashinfer for its sampler even where it is not installed, and dies.
    if util.find_spec("flashinfer") is None:
        return {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {}


def _signal_hint(code: int) -> str:
    return f" (signal {code - 128})" if code > 128 else ""


def _plain_token(launch: Launch) -> int:
    """An id that is no special token."""
    return next(i for i in range(launch.model.vocab_size) if i not in launch.model.special_ids)


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
