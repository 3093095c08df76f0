"""Serving sweeps that are hurt while they run, with real vLLM engines on the CPU.

Engines take most of a minute to start, so one sweep meets one fault after the other.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sweep_process import SweepProcess, free_ports, kill

pytest.importorskip("vllm", reason="needs vLLM")

LATE_S = 10
# A cell per fault, each of one request; the sixth is too long for its deadline.
SHAPES = ("11/400", "12/400", "13/400", "14/400", "15/8", "16/8000", "17/4000")
SERVER = "kind:wide_tp,tp:1,dp:1,ep:null,enable_ep:false,router:round_robin"
Start = Callable[..., SweepProcess]


def experiment(base: int) -> list[str]:
    """An arm that cannot start and one that can, each with one engine, on 100 ports."""
    return [
        "+exp=quickstart",
        "measure=[serving]",
        "cluster.dashboard=false",
        f"arm={{{SERVER},name:broken,extra_args:[--no-such-flag]}}",
        f"against.arms.wide_tp={{{SERVER},name:one}}",
        *(f"{arm}.api_port={base}" for arm in ("arm", "against.arms.wide_tp")),
        *(f"{arm}.vllm_port={base + 30}" for arm in ("arm", "against.arms.wide_tp")),
        f"router.port={base + 10}",
        "load.concurrency=[1]",
        "load.min_requests=1",
        "load.requests_per_slot=1",
        "load.warmups=0",
        "load.calibration=0",
        f"load.shapes=[{','.join(SHAPES)}]",
        f"load.request_timeout_s={LATE_S}",
        "deadlines.teardown_s=5",
    ]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[SweepProcess] = []

    def begin(*overrides: str) -> SweepProcess:
        started.append(SweepProcess(tmp_path, *overrides))
        return started[-1]

    yield begin
    for sweep in started:
        sweep.destroy()


def engine_core(sweep: SweepProcess) -> list[int]:
    """The process behind the API server; it has a title where setproctitle is installed."""
    return sweep.pids("VLLM::EngineCore") or sweep.pids("from multiprocessing.spawn")


def in_cell(sweep: SweepProcess, ended: int) -> None:
    """Waits until `ended` trials are on disk and the load of the next one is sent."""
    sweep.until_trials(ended)
    sweep.until(lambda: sweep.pids("ray::LoadClientActor.run"), f"load after {ended} trials")


@pytest.mark.timeout(900)
def test_each_fault_costs_its_cell_and_no_more(start: Start) -> None:
    sweep = start(*experiment(free_ports()))
    down = len(SHAPES)
    in_cell(sweep, down)
    kill(engine_core(sweep), signal.SIGKILL)
    in_cell(sweep, down + 1)
    hanging = engine_core(sweep)
    kill(hanging, signal.SIGSTOP)
    in_cell(sweep, down + 2)
    engine = engine_core(sweep)
    assert not set(hanging) & set(sweep.pids())
    kill(sweep.pids("ray::RouterActor") or sweep.pids("ray::router"), signal.SIGKILL)
    in_cell(sweep, down + 3)
    kill(sweep.pids("ray::LoadClientActor.run"), signal.SIGKILL)
    in_cell(sweep, down + 6)
    assert engine_core(sweep) == engine
    sweep.signal(signal.SIGINT, group=True)
    assert sweep.wait() == 1, sweep.output
    sweep.assert_nothing_left()
    for row in sweep.trials():
        print(row["trial_id"], row["status"], row["error"])
    print(sweep.output)
    assert 0
