"""What the load client and the router add on this machine, against an engine without a model.

Client and router run in their Ray actors, as in a sweep, each on a core of its own where there are
enough. Runs with and without the router take turns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import psutil
import ray

from ep_ray.config.schema import Cluster
from ep_ray.cores import keep_to, seats
from ep_ray.session import Session
from ep_ray.watchdog import wait_all
from serving.load.actor import LoadClient
from serving.load.metrics import cell_metrics, ttft_ns
from serving.load.prompts import CallSpec, build_requests
from serving.load.records import CellRecord
from serving.load.target import Target
from serving.null_engine import Running, running
from serving.null_server import AS_A_MODEL, Pace, Sent
from serving.router.actor import RouterActor

_CALL_S = 60.0
_RUN_S = 300.0
_VOCAB = 100_000
_PROMPT = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """A load: `requests` of `tokens` tokens each, `concurrency` in flight, at the engine's pace."""

    name: str
    pace: Pace
    tokens: int
    concurrency: int
    requests: int

    @property
    def ideal_tok_s(self) -> float | None:
        """Tokens per second if nothing but the engine took time; None without a pace."""
        stream_ns = self.pace.ttft_ns + (self.tokens - 1) * self.pace.itl_ns
        return self.concurrency * self.tokens / (stream_ns / 1e9) if stream_ns else None


CELLS = (
    Cell("paced c=64", AS_A_MODEL, 128, 64, 256),
    Cell("paced c=256", AS_A_MODEL, 128, 256, 1024),
    Cell("one token c=64", Pace(), 1, 64, 4000),
    Cell("16 per send c=64", Pace(tokens_per_send=16), 256, 64, 1000),
)
QUICK = tuple(cell for cell in CELLS if cell.concurrency == 64)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a cell.

    Attributes:
        cell: Its name.
        routed: Whether requests went through the router.
        ok: Complete requests; failed ones have their first reason in `reason`.
        ttft_p50_ms: As the client saw it; likewise p99.
        ttft_error_p50_ms: Of each request, what the client saw less what the engine says that it
            took from the request's last byte to its own first write; likewise p99.
        itl_p50_ms: Time per token, pooled.
        tokens_per_s: Over the run's wall time; `requests_per_s` likewise.
        of_ideal: Tokens per second over the ideal; None without a pace.
        client_lag_p99_ms: How late the client's event loop was.
        client_busy: CPU time over wall time; likewise the engine's and the router's.
    """

    cell: str
    routed: bool
    ok: int
    failed: int
    reason: str
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_error_p50_ms: float
    ttft_error_p99_ms: float
    itl_p50_ms: float | None
    tokens_per_s: float
    requests_per_s: float
    of_ideal: float | None
    client_lag_p99_ms: float
    client_busy: float
    engine_busy: float
    router_busy: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found.

    Attributes:
        cores: Core of the engine, the client and the router.
        load_average: One minute's, before and after.
    """

    runs: tuple[Run, ...]
    cores: dict[str, int]
    load_average: tuple[float, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(cells: Sequence[Cell], repeats: int) -> Measured:
    """Runs every cell `repeats` times directly and as often through the router.

    Raises:
        ConfigError: Ray did not start.
        TrialError: Client or router died, or did not answer in time.
        RuntimeError: The engine did not come up.
    """
    names = ("engine", "client", "router")
    cores = dict(zip(names, seats(len(names)), strict=True))
    before = os.getloadavg()[0]
    with _ray(), _Actors(cores) as actors:
        runs = tuple(_runs(cells, repeats, actors, cores["engine"]))
    return Measured(runs, cores, (before, os.getloadavg()[0]))


def _runs(cells: Sequence[Cell], repeats: int, actors: _Actors, engine_core: int) -> Iterator[Run]:
    for cell in cells:
        with running(cell.pace, engine_core) as engine:
            actors.route_to(engine.url)
            for repeat in range(repeats):
                for routed in (False, True) if repeat % 2 == 0 else (True, False):
                    tag = f"{cell.name}-{repeat}-{'routed' if routed else 'direct'}"
                    yield actors.run(cell, engine, routed, tag.replace(" ", "-"))


@contextmanager
def _ray() -> Iterator[None]:
    session = Session(Cluster("doctor", cpus=1, gpus=0, dashboard=False), ranks=0)
    try:
        session.start()
        yield
    finally:
        session.close()


class _Actors:
    """The client's and the router's actor, on their cores."""

    def __init__(self, cores: dict[str, int]) -> None:
        self._cores = cores

    def __enter__(self) -> _Actors:
        self._client: Any = cast(Any, LoadClient).options(num_cpus=0).remote()
        self._router: Any = cast(Any, RouterActor).options(num_cpus=0).remote("doctor")
        self._url: str = self._ask(self._router.start, "start of the router")
        # The router's pid; and after its start, so that its threads are there.
        self._pid: int = self._keep(self._router, "router")
        self._keep(self._client, "client")
        return self

    def __exit__(self, *_: object) -> None:
        for actor in (self._client, self._router):
            ray.kill(actor)

    def _keep(self, actor: Any, name: str) -> int:
        return int(self._ask(actor.__ray_call__, f"core of the {name}", keep_to, self._cores[name]))

    def _ask(self, method: Any, what: str, *arguments: object, deadline_s: float = _CALL_S) -> Any:
        return wait_all([method.remote(*arguments)], deadline_s, what)[0]

    def route_to(self, url: str) -> None:
        """Makes the router's only endpoint that one."""
        self._ask(self._router.set_endpoints, "the router's endpoint", [("engine", url)])

    def run(self, cell: Cell, engine: Running, routed: bool, tag: str) -> Run:
        """One run; what came before is not in its figures."""
        spec = CallSpec("null", "completions", _PROMPT, cell.tokens, _VOCAB)
        requests = build_requests(
            spec, seed=0, trial_id=tag, measured=cell.requests, warmups=cell.concurrency
        )
        target = Target.parse(self._url if routed else engine.url, "completions")
        engine.log()
        before = _cpu_s(engine.pid), _cpu_s(self._pid)
        arguments = ([target], requests, cell.concurrency, _RUN_S)
        record: CellRecord = self._ask(
            self._client.run, f"run {tag}", *arguments, deadline_s=_RUN_S
        )
        used = _cpu_s(engine.pid) - before[0], _cpu_s(self._pid) - before[1]
        return _figures(cell, routed, record, engine.log(), used)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _figures(
    cell: Cell, routed: bool, record: CellRecord, log: dict[str, Sent], used_s: tuple[float, float]
) -> Run:
    seen = cell_metrics(record.requests, record.wall_ns, cell.concurrency)
    measured = [r for r in record.requests if r.role == "measured"]
    errors = [
        saw_ns - (sent.first_ns - sent.received_ns)
        for r in measured
        if (saw_ns := ttft_ns(r)) is not None and (sent := log.get(r.request_id))
    ]
    error_p50, error_p99 = np.percentile(np.array(errors) / 1e6, [50, 99]) if errors else (0, 0)
    ideal = cell.ideal_tok_s
    # CPU time counts the warm-up too, which is the same load: scaled to the whole run.
    started_ns = min(r.intended_ns for r in record.requests)
    whole_s = (max(r.end_ns for r in record.requests) - started_ns) / 1e9
    return Run(
        cell=cell.name,
        routed=routed,
        ok=seen.ok,
        failed=seen.total - seen.ok,
        reason=next((r.reason for r in measured if r.state != "complete"), ""),
        ttft_p50_ms=seen.ttft_p50_ms or 0.0,
        ttft_p99_ms=seen.ttft_p99_ms or 0.0,
        ttft_error_p50_ms=float(error_p50),
        ttft_error_p99_ms=float(error_p99),
        itl_p50_ms=seen.itl_p50_ms,
        tokens_per_s=seen.output_tokens_per_s or 0.0,
        requests_per_s=seen.requests_per_s or 0.0,
        of_ideal=(seen.output_tokens_per_s or 0.0) / ideal if ideal else None,
        client_lag_p99_ms=record.client_lag_p99_ns / 1e6,
        client_busy=record.client_cpu_ns / 1e9 / whole_s,
        engine_busy=used_s[0] / whole_s,
        router_busy=used_s[1] / whole_s if routed else None,
    )
