"""`isolate=true` from the command line: the router triple, before engines that run already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from serving.null_engine import running
from serving.null_server import Pace
from tests.sweep_process import SweepProcess, free_ports

ARMS = ("attached", "attached_direct", "null_x1_round_robin", "null_x1_direct")
PACE = Pace(ttft_ns=5_000_000, itl_ns=1_000_000)
SENT = 1 + 2 + 8  # calibration, warm-ups, measured


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SweepProcess]:
    with running(PACE) as engine:
        sweep = SweepProcess(
            tmp_path_factory.mktemp("isolate"),
            *("+exp=attached", "isolate=true", f"arm.url={engine.url}", "arm.router=round_robin"),
            *("arm.rank_urls=[]", "model.vocab_size=1000", "cluster.dashboard=false"),
            *("load.shapes=[12/8]", "load.concurrency=[4]", "load.min_requests=8"),
            *("load.requests_per_slot=1", "load.warmups=2", f"router.port={free_ports()}"),
        )
        assert sweep.wait() == 0, sweep.output
        sweep.assert_nothing_left()
        yield sweep
        sweep.destroy()


@pytest.fixture(scope="module")
def tables(sweep: SweepProcess) -> dict[str, list[dict[str, Any]]]:
    return sweep.tables()


def test_the_router_is_left_out_and_engines_without_a_model_stand_in(tables):
    found = [(r["arm"], r["status"], r["router"], r["arm_kind"]) for r in tables["trials"]]
    assert sorted(found) == [
        ("attached", "ok", "round_robin", "attached"),
        ("attached_direct", "ok", "none", "attached"),
        ("null_x1_direct", "ok", "none", "null_engine"),
        ("null_x1_round_robin", "ok", "round_robin", "null_engine"),
    ]


def test_null_engines_count_for_the_ledger(tables):
    arms = {row["trial_id"]: row["arm"] for row in tables["trials"]}
    rows = {arms[r["trial_id"]]: r for r in tables["ledger"] if r["role"] == "all"}
    assert {row["agrees"] for row in tables["ledger"]} == {True}
    for arm, forwarded in (("null_x1_round_robin", SENT), ("null_x1_direct", None)):
        row = rows[arm]
        assert (row["client_sent"], row["router_forwarded"]) == (SENT, forwarded)
        assert row["engine_complete"] == SENT


def test_null_engines_keep_their_pace(tables):
    """50 ms and 10 ms for each token; no request can be faster."""
    ids = {r["trial_id"] for r in tables["trials"] if r["arm_kind"] == "null_engine"}
    rows = [r for r in tables["requests"] if r["trial_id"] in ids and r["role"] == "measured"]
    assert len(rows) == 16
    assert min(r["chunk_ns"][0] - r["sent_ns"] for r in rows) >= 50e6
    assert min(r["chunk_ns"][-1] - r["sent_ns"] for r in rows) >= 50e6 + 7 * 10e6


def test_both_engines_are_asked_for_a_token_directly(tables):
    ids = {r["trial_id"] for r in tables["trials"] if r["arm"].startswith("null_")}
    rows = [r for r in tables["status"] if r["trial_id"] in ids]
    assert rows
    assert all(row["probe_ns"] and row["probe_error"] is None for row in rows)


def test_the_report_attributes(sweep):
    report = (sweep.results / "report.md").read_text()
    assert "Attribution" in report
    assert "The router alone" in report
    assert "12/8 null engines" in report
