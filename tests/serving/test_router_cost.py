"""No router, ep-ray's and vllm-router before the same two engines, from the command line on."""

from __future__ import annotations

import http.server
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.load.client import run_cell
from serving.load.prompts import CallSpec, build_requests
from serving.load.target import Target
from serving.null_engine import running
from serving.null_server import Pace
from serving.router.vllm_router import VllmRouter, find_program
from tests.sweep_process import SweepProcess, free_ports, kill

pytest.importorskip("vllm_router", reason="needs vllm-router")

CALIBRATION, WARMUPS, MEASURED = 1, 2, 11
SENT = CALIBRATION + WARMUPS + MEASURED
PACE = Pace(ttft_ns=2_000_000, itl_ns=1_000_000)
ARMS = ("ours", "theirs", "direct")


def attached(key: str, name: str, router: str, urls: list[str]) -> list[str]:
    values = {"name": name, "router": router, "url": urls[0], "rank_urls": f"[{','.join(urls)}]"}
    return [f"{key}.{field}={value}" for field, value in values.items()]


def overrides(urls: list[str], port: int) -> list[str]:
    """Two engines that run already, behind each router in turn; `direct` goes to the first."""
    arms = {
        "arm": ("ours", "round_robin"),
        "against.arms.theirs": ("theirs", "vllm_router"),
        "against.arms.direct": ("direct", "none"),
    }
    return [
        "+exp=attached",
        *(f"+arm@{key}=attached" for key in arms if key != "arm"),
        *(o for key, (name, router) in arms.items() for o in attached(key, name, router, urls)),
        "model.vocab_size=1000",
        "cluster.dashboard=false",
        "load.shapes=[12/8]",
        "load.concurrency=[4]",
        f"load.min_requests={MEASURED}",
        "load.requests_per_slot=1",
        f"load.warmups={WARMUPS}",
        f"router.port={port}",
    ]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SweepProcess, list[str]]]:
    with running(PACE) as one, running(PACE) as other:
        urls = [one.url, other.url]
        sweep = SweepProcess(tmp_path_factory.mktemp("cost"), *overrides(urls, free_ports()))
        assert sweep.wait() == 0, sweep.output
        sweep.assert_nothing_left()
        yield sweep, urls
        sweep.destroy()


@pytest.fixture(scope="module")
def tables(ran: tuple[SweepProcess, list[str]]) -> dict[str, list[dict[str, Any]]]:
    return ran[0].tables()


def of_arm(tables: dict[str, list[dict[str, Any]]], table: str, arm: str) -> list[dict[str, Any]]:
    (trial,) = [row["trial_id"] for row in tables["trials"] if row["arm"] == arm]
    return [row for row in tables[table] if row["trial_id"] == trial]


def test_every_arm_ends_well_and_says_which_router_it_had(tables):
    assert [(r["arm"], r["status"], r["router"]) for r in tables["trials"]] == [
        ("ours", "ok", "round_robin"), ("theirs", "ok", "vllm_router"), ("direct", "ok", "none"),
    ]  # fmt: skip
    for arm in ARMS:
        assert len(of_arm(tables, "requests", arm)) == SENT
    versions = [json.loads(row["versions_json"]) for row in tables["trials"]]
    assert all(found["vllm-router"] not in ("", "unknown") for found in versions)


def test_vllm_router_goes_round_and_only_the_sums_are_compared(tables, ran):
    rows = of_arm(tables, "ledger", "theirs")
    ranks = [row for row in rows if row["endpoint"] in ran[1]]
    assert [row["engine_complete"] for row in ranks] == [SENT / 2, SENT / 2]
    assert {row["agrees"] for row in ranks} == {None}
    (total,) = [r for r in rows if r["endpoint"] == "?" and r["role"] == "all"]
    assert (total["client_complete"], total["engine_complete"], total["agrees"]) == (
        SENT, SENT, True,
    )  # fmt: skip
    assert all(value is None for row in rows for key, value in row.items() if "router_" in key)
    assert {row["endpoint"] for row in of_arm(tables, "requests", "theirs")} == {None}


def test_ep_rays_own_router_counts_rank_by_rank_beside_it(tables, ran):
    rows = [row for row in of_arm(tables, "ledger", "ours") if row["role"] == "all"]
    assert [row["endpoint"] for row in rows] == ran[1]
    for row in rows:
        assert row["router_forwarded"] == row["engine_complete"] == SENT / 2
        assert row["agrees"] is True


def test_only_what_vllm_router_says_is_in_its_status(tables, ran):
    rows = of_arm(tables, "status", "theirs")
    assert [row["endpoint"] for row in rows] == ran[1]
    for row in rows:
        assert (row["load_balance"], row["desired"], row["ready"]) == ("vllm_router", 2, 2)
        assert (row["registered"], row["healthy"]) == (True, True)
        assert (row["in_selection"], row["circuit"]) == (None, None)
        assert row["probe_ns"] > 0


def test_the_report_says_what_its_ledger_compares(ran):
    report = (ran[0].results / "report.md").read_text()
    assert "Router `vllm_router` (theirs): it counts no request by role" in report
    assert "vllm-router" in report


def test_it_sends_each_request_once_and_gives_no_rank_up(tmp_path: Path) -> None:
    """Every answer is a 500, which retries and circuit breakers would count against the rank."""
    taken: list[int] = []

    class Failing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            taken.append(int(self.headers["content-length"]))
            self.send_response(500)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    router = VllmRouter(find_program(None), "127.0.0.1", free_ports(), tmp_path / "log")
    try:
        url = router.start([("rank0", f"http://127.0.0.1:{server.server_port}")])
        spec = CallSpec("m", "completions", 4, 2, 1000)
        requests = build_requests(spec, seed=0, trial_id="t", measured=12)
        record = run_cell(Target.parse(url, "completions"), requests, 1, 60.0)
        assert {request.http_status for request in record.requests} == {500}
        assert len(taken) == 12
        (rank,) = router.status()["endpoints"]
        assert (rank["name"], rank["registered"], rank["healthy"]) == ("rank0", True, True)
    finally:
        left = router.stop()
        server.shutdown()
        server.server_close()
    assert left == []


def test_a_killed_vllm_router_costs_its_cell_and_is_replaced(tmp_path: Path) -> None:
    slow = Pace(ttft_ns=4_000_000_000)
    with running(slow) as engine:
        # Two cells of one arm; the engine holds each request long enough to be hurt.
        chosen = [o for o in overrides([engine.url], free_ports()) if "against" not in o]
        small = ["load.concurrency=[1,2]", "load.min_requests=1", "load.warmups=0",
                 "load.calibration=0"]  # fmt: skip
        sweep = SweepProcess(tmp_path, *chosen, "arm.router=vllm_router", *small)
        try:
            sweep.until(lambda: sweep.pids("ray::LoadClientActor.run"), "load of the first cell")
            kill(sweep.pids("vllm::router"), signal.SIGKILL)
            assert sweep.wait() == 1, sweep.output
            sweep.assert_nothing_left()
            first, second = sweep.trials()
            assert first["status"] == "crash"
            assert "vllm-router ended with exit code 137" in first["error"]
            assert second["status"] == "ok"
        finally:
            sweep.destroy()
