"""Cancelled requests through a real router to engines without a model, and in a whole sweep."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from serving import engine_http
from serving.ledger import reconcile
from serving.load.client import run_cell
from serving.load.prompts import CallSpec, build_requests
from serving.load.target import Target
from serving.null_engine import Running, running
from serving.null_server import Pace
from serving.router.router import Router
from sweeps.store import read_all
from tests.sweep_process import latest_results

DEADLINE_S = 240.0
# 64 tokens at 5 ms: what is cancelled after 4 has 300 ms left.
PACE = Pace(ttft_ns=5_000_000, itl_ns=5_000_000)
TOKENS, AFTER, MEASURED, WARMUPS = 64, 4, 16, 2


@pytest.fixture
def engines() -> Iterator[list[Running]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running(PACE)) for _ in range(2)]


@pytest.fixture
def router(engines: list[Running]) -> Iterator[Router]:
    router = Router("test")
    router.start()
    router.set_endpoints([(engine.url, engine.url) for engine in engines])
    yield router
    router.stop()


def settled(engine: Running) -> dict[str, int]:
    found = engine_http.stable_counters(lambda: engine_http.counters(engine.url), DEADLINE_S)
    return {"complete": found.complete, "aborted": found.aborted}


@pytest.mark.parametrize("routed", [True, False])
def test_client_router_and_engines_agree_on_what_was_cancelled(engines, router, routed):
    spec = CallSpec("null", "completions", 8, TOKENS, 1000, draw="d", cancel_share=0.5,
                    cancel_after_tokens=AFTER)  # fmt: skip
    requests = build_requests(spec, seed=0, trial_id="t", measured=MEASURED, warmups=WARMUPS)
    urls = [engine.url for engine in engines]
    asked = [router.status()["url"]] if routed else urls
    targets = [Target.parse(url, "completions", url) for url in asked]
    cell = run_cell(targets, requests, 4, DEADLINE_S)
    counts = {engine.url: settled(engine) for engine in engines}
    rows = reconcile(cell.requests, urls, router.counters() if routed else None, counts)
    assert {row.agrees for row in rows} == {True}
    totals = [row for row in rows if row.role == "all"]
    assert sum(row.client_complete or 0 for row in totals) == MEASURED // 2 + WARMUPS
    assert sum(row.client_aborted or 0 for row in totals) == MEASURED // 2
    for row in totals:
        assert row.engine_aborted == row.client_aborted
        assert row.router_aborted == (row.client_aborted if routed else None)
        sent = row.engine_complete + row.engine_aborted
        assert row.client_sent == sent == MEASURED // 2 + WARMUPS // 2
    cancelled = {r.request_id for r in cell.requests if r.cancelled}
    assert cancelled == {r.request_id for r in requests if r.cancel_after_tokens}
    for record in cell.requests:
        received = sum(record.chunk_tokens)
        assert AFTER <= received < TOKENS if record.cancelled else received == TOKENS


def rows_of(tables: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return list(tables[name].to_pylist())


def test_a_sweep_whose_client_cancels_ends_well(engines, router, tmp_path: Path):
    urls = ",".join(engine.url for engine in engines)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ep_ray.sweep", "+exp=attached", "cluster.dashboard=false"),
            *(f"arm.url={router.status()['url']}", f"arm.rank_urls=[{urls}]"),
            *("model.vocab_size=1000", f"load.shapes=[8/{TOKENS}]", "load.concurrency=[4]"),
            *(f"load.min_requests={MEASURED}", "load.requests_per_slot=1", "repeats=2"),
            *("load.cancel_share=0.25", f"load.cancel_after_tokens={AFTER}"),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = latest_results(tmp_path)
    tables = read_all(results)
    trials = rows_of(tables, "trials")
    assert [(t["status"], t["cancel_share"], t["cancel_after_tokens"]) for t in trials] == [
        ("ok", 0.25, AFTER)
    ] * 2
    states: dict[str, set[int]] = {}
    for row in rows_of(tables, "requests"):
        assert row["state"] in ("complete", "aborted")
        if row["state"] == "aborted":
            assert (row["role"], row["reason"]) == ("measured", "cancelled by the client")
            place = int(row["request_id"].rpartition("-")[2])
            states.setdefault(row["trial_id"], set()).add(place)
    assert [len(places) for places in states.values()] == [4, 4]
    ledger = [row for row in rows_of(tables, "ledger") if row["role"] == "all"]
    assert {row["agrees"] for row in ledger} == {True}
    assert sum(row["client_aborted"] for row in ledger) == 8
    assert sum(row["engine_aborted"] for row in ledger) == 8
    routed = [c["aborted"] for roles in router.counters().values() for c in roles.values()]
    assert sum(routed) == 8
    report = (results / "report.md").read_text()
    assert f"8/{TOKENS} with 25 % cancelled after {AFTER} tokens" in report
    assert "no request failed" in report
    assert "24/32 | 8" in report
