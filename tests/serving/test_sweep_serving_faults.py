"""Serving sweeps that are hurt while they run, with real vLLM engines on the CPU.

Engines take most of a minute to start, so one sweep meets one fault after the other.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving import ports
from tests.sweep_process import GONE_S, SweepProcess, free_ports, kill

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
    trials = sweep.trials()
    assert {row["arm"] for row in trials[:down]} == {"broken"}
    assert {row["status"] for row in trials[:down]} == {"crash"}
    assert all("--no-such-flag" in row["error"] for row in trials[:down])
    killed, hung, unrouted, unsent, fine, late = trials[down:]
    assert killed["status"] == "crash"
    assert hung["status"] == "timeout"
    assert unrouted["status"] == "crash"
    assert "router" in unrouted["error"]
    assert unsent["status"] == "crash"
    assert "the load client" in unsent["error"]
    assert fine["status"] == "ok"
    assert late["status"] == "failed"
    assert late["error"] == f"1 of 1 requests not complete: timeout after {LATE_S} s"
    # What is known of an arm that was up stands beside its dead cells too.
    assert {row["versions_json"] for row in trials[:down]} == {None}
    assert len({row["versions_json"] for row in trials[down:]}) == 1
    assert '"vllm"' in killed["versions_json"]
    assert_late_request_is_accounted_for(sweep, late["trial_id"])


def assert_late_request_is_accounted_for(sweep: SweepProcess, trial_id: str) -> None:
    """The client gave it up; router and engine saw that, and nobody calls it complete."""
    tables = {
        name: [row for row in rows if row["trial_id"] == trial_id]
        for name, rows in sweep.tables().items()
    }
    (request,) = tables["requests"]
    assert request["state"] == "failed"
    assert request["reason"] == f"timeout after {LATE_S} s"
    (total,) = [row for row in tables["ledger"] if row["role"] == "all"]
    assert total["client_sent"] == total["client_failed"] == total["router_forwarded"] == 1
    assert total["router_aborted"] == 1
    assert total["engine_aborted"] in (0, 1)  # vLLM need not count an abort (vllm#31503)
    assert total["client_complete"] == total["router_complete"] == total["engine_complete"] == 0
    assert total["agrees"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_driver_that_ends_while_engines_start_leaves_none(start: Start, signum: int) -> None:
    base = free_ports()
    sweep = start(*experiment(base), f"arm={{{SERVER},name:two,extra_args:[]}}")
    sweep.until(lambda: sweep.pids("vllm.entrypoints"), "start of the engine")
    sweep.signal(signum)
    assert sweep.wait() == (1 if signum == signal.SIGTERM else -signum), sweep.output
    sweep.assert_nothing_left(GONE_S if signum == signal.SIGKILL else 0.0)
    assert ports.wait_free(range(base, base + 100), 0.0) == []
    assert sweep.trials() == []


@pytest.mark.parametrize(
    ("offset", "who", "override"),
    [(0, "API server of rank 0", "arm.api_port="), (10, "the router", "router.port=")],
)
def test_taken_port_is_named_before_anything_starts(
    start: Start, tmp_path: Path, offset: int, who: str, override: str
) -> None:
    base = free_ports()
    with socket.create_server(("127.0.0.1", base + offset)):
        sweep = start(*experiment(base))
        assert sweep.wait() == 2
    assert who in sweep.output
    assert f"port {base + offset} on 127.0.0.1, moved by {override}" in sweep.output
    assert not (tmp_path / "runs").exists()
