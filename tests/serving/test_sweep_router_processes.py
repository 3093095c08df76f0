"""Sweeps whose router is two processes: the ledger agrees, and a killed one costs its cell."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.null_engine import running
from serving.null_server import Pace
from tests.sweep_process import SweepProcess, free_ports, kill

CALIBRATION, WARMUPS, CONCURRENCY, MEASURED = 1, 2, 32, 94
SENT = CALIBRATION + WARMUPS + MEASURED
SLOW = Pace(ttft_ns=2_000_000_000)


def overrides(urls: list[str], port: int) -> list[str]:
    arms = {"arm": ("routed", "round_robin"), "against.arms.direct": ("direct", "none")}
    return [
        "+exp=attached",
        "+arm@against.arms.direct=attached",
        *(f"{arm}.name={name}" for arm, (name, _) in arms.items()),
        *(f"{arm}.router={router}" for arm, (_, router) in arms.items()),
        *(f"{arm}.url={urls[0]}" for arm in arms),
        *(f"{arm}.rank_urls=[{','.join(urls)}]" for arm in arms),
        "model.vocab_size=1000",
        "cluster.dashboard=false",
        "load.shapes=[12/8]",
        f"load.concurrency=[{CONCURRENCY}]",
        f"load.min_requests={MEASURED}",
        "load.requests_per_slot=1",
        f"load.warmups={WARMUPS}",
        f"router.port={port}",
        "router.processes=2",
    ]


def in_flight(port: int) -> dict[str, int]:
    """Requests that each process has in flight, of those that happened to answer."""
    found = {}
    for _ in range(8):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer:
                document = json.load(answer)
        except OSError:  # not up yet
            return {}
        found[document["counts_of"]] = sum(e["in_flight"] for e in document["endpoints"])
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SweepProcess, list[str]]]:
    with running(SLOW) as one, running(SLOW) as other:
        urls, port = [one.url, other.url], free_ports()
        sweep = SweepProcess(tmp_path_factory.mktemp("processes"), *overrides(urls, port))
        try:

            def both_serve() -> bool:
                found = in_flight(port)
                return set(found) == {"process0", "process1"} and all(found.values())

            sweep.until(both_serve, "requests in flight in both processes")
            assert sweep.wait() == 0, sweep.output
            sweep.assert_nothing_left()
            yield sweep, urls
        finally:
            sweep.destroy()


def of_arm(sweep: SweepProcess, table: str, arm: str) -> list[dict[str, Any]]:
    tables = sweep.tables()
    (trial,) = [row["trial_id"] for row in tables["trials"] if row["arm"] == arm]
    return [row for row in tables[table] if row["trial_id"] == trial]


def test_the_ledger_agrees_rank_by_rank(ran):
    sweep, urls = ran
    rows = [row for row in of_arm(sweep, "ledger", "routed") if row["role"] == "all"]
    assert [(row["endpoint"], row["agrees"]) for row in rows] == [(url, True) for url in urls]
    for row in rows:
        counts = {row[key] for key in ("client_complete", "router_complete", "engine_complete")}
        assert counts == {row["router_forwarded"]} == {row["client_sent"]}
    sent = [row["router_forwarded"] for row in rows]
    assert sum(sent) == SENT
    assert abs(sent[0] - sent[1]) <= 2  # one for each process, where one process is exact


def test_every_rank_is_in_selection_in_both_processes(ran):
    for row in of_arm(ran[0], "status", "routed"):
        assert (row["load_balance"], row["desired"], row["ready"]) == ("round_robin", 2, 2)
        assert (row["in_selection"], row["circuit"]) == (True, "closed")


def test_trials_and_report_say_how_many_processes_the_router_had(ran):
    trials = {row["arm"]: row["router_processes"] for row in ran[0].trials()}
    assert trials == {"routed": 2, "direct": None}
    report = (ran[0].results / "report.md").read_text()
    assert "Routers of several processes" in report
    assert "Router of several processes on one port (routed: 2 processes)" in report


def test_a_killed_process_costs_its_cell_and_the_router_is_replaced_whole(tmp_path: Path) -> None:
    with running(SLOW) as engine:
        port = free_ports()
        chosen = [o for o in overrides([engine.url], port) if "against" not in o]
        small = ["load.concurrency=[1,2]", "load.min_requests=2", "load.warmups=0",
                 "load.calibration=0"]  # fmt: skip
        sweep = SweepProcess(tmp_path, *chosen, *small)
        try:
            sweep.until(lambda: sweep.pids("ray::LoadClientActor.run"), "load of the first cell")
            routers = sweep.pids("ray::RouterActor") or sweep.pids("ray::router")
            assert len(routers) == 2
            kill(routers[:1], signal.SIGKILL)
            assert sweep.wait() == 1, sweep.output
            sweep.assert_nothing_left()
            first, second = sweep.trials()
            assert first["status"] == "crash"
            assert "the router's counters, process" in first["error"]
            assert (second["status"], second["router_processes"]) == ("ok", 2)
        finally:
            sweep.destroy()


def test_a_port_that_somebody_shares_is_told_before_anything_starts(tmp_path: Path) -> None:
    with running(SLOW) as engine:
        port = free_ports()
        chosen = [o for o in overrides([engine.url], port) if "against" not in o]
        stranger = tmp_path / "stranger.py"
        stranger.write_text(
            "import socket, time\n"
            f"with socket.create_server(('127.0.0.1', {port}), reuse_port=True):\n"
            "    print('up', flush=True)\n    time.sleep(600)\n"
        )
        process = subprocess.Popen([sys.executable, str(stranger)], stdout=subprocess.PIPE)
        sweep = None
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            sweep = SweepProcess(tmp_path, *chosen)
            assert sweep.wait() == 2, sweep.output
            assert f"the router (port {port} on" in sweep.output
            assert "router.port=" in sweep.output
            assert not (tmp_path / "runs").exists()
        finally:
            process.kill()
            process.wait()
            if sweep is not None:
                sweep.destroy()
