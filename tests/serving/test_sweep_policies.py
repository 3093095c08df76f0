"""Router policies in front of the same two real vLLM ranks, and what a sweep says of the ranks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sweep_process import SweepProcess, free_ports

pytest.importorskip("vllm", reason="needs vLLM")

ARMS = ("round_robin", "random", "least_inflight", "session", "direct")
RANKS = ("rank0", "rank1")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SweepProcess]:
    base = free_ports()
    keys = {"api_port": base, "vllm_port": base + 30, "rpc_port": base + 20}
    arms = ("arm", *(f"against.arms.{name}" for name in ARMS[1:]))
    sweep = SweepProcess(
        tmp_path_factory.mktemp("policies"),
        "+exp=router_policies",
        "cluster.dashboard=false",
        f"router.port={base + 10}",
        *(f"{arm}.{key}={port}" for arm in arms for key, port in keys.items()),
    )
    assert sweep.wait() == 0, sweep.output
    sweep.assert_nothing_left()
    yield sweep
    sweep.destroy()


@pytest.fixture(scope="module")
def tables(sweep: SweepProcess) -> dict[str, list[dict[str, Any]]]:
    return sweep.tables()


def of_arm(tables: dict[str, list[dict[str, Any]]], table: str, arm: str) -> list[dict[str, Any]]:
    (trial,) = [row["trial_id"] for row in tables["trials"] if row["arm"] == arm]
    return [row for row in tables[table] if row["trial_id"] == trial]


@pytest.mark.timeout(400)
def test_every_policy_ends_well_and_its_ledger_agrees(tables):
    assert {row["arm"]: row["status"] for row in tables["trials"]} == dict.fromkeys(ARMS, "ok")
    for arm in ARMS:
        assert {row["agrees"] for row in of_arm(tables, "ledger", arm)} == {True}


def placed(tables: dict[str, list[dict[str, Any]]], arm: str) -> Counter[str]:
    rows = of_arm(tables, "requests", arm)
    return Counter(r["endpoint"].rpartition(":")[2] for r in rows if r["role"] == "measured")


@pytest.mark.parametrize("arm", ["round_robin", "direct"])
def test_round_robin_is_exact(tables, arm):
    assert set(placed(tables, arm).values()) == {6}


@pytest.mark.parametrize("arm", ["random", "least_inflight"])
def test_the_other_policies_place_every_request(tables, arm):
    assert placed(tables, arm).total() == 12


def test_a_session_stays_at_one_rank(tables):
    where: dict[int, set[str]] = {}
    for row in of_arm(tables, "requests", "session"):
        session = int(row["request_id"].rpartition("-")[2]) % 6
        where.setdefault(session, set()).add(row["endpoint"])
    assert len(where) == 6
    assert {len(ranks) for ranks in where.values()} == {1}


def test_the_status_of_every_rank_is_kept(tables):
    rows = of_arm(tables, "status", "round_robin")
    assert [(row["when"], row["endpoint"].rpartition(":")[2]) for row in rows] == [
        (when, rank) for when in ("before", "after") for rank in RANKS
    ]
    for row in rows:
        assert (row["load_balance"], row["desired"], row["ready"]) == ("round_robin", 2, 2)
        assert json.loads(row["parallelism"])["dp"] == 2
        assert (row["registered"], row["healthy"], row["in_selection"]) == (True, True, True)
        assert (row["circuit"], row["probe_error"]) == ("closed", None)
        assert row["probe_ns"] > 0
    # Policies share the router, and the document names the one in use.
    assert {row["load_balance"] for row in of_arm(tables, "status", "session")} == {"session"}
    direct = of_arm(tables, "status", "direct")
    assert [row["load_balance"] for row in direct] == [None, None]
    assert all(row["probe_ns"] > 0 for row in direct)


def test_what_every_rank_ran_is_kept(sweep, tables):
    rows = of_arm(tables, "running", "round_robin")
    # In External DP an API server knows its own rank only, by its number in the group.
    names = {(row["endpoint"].rpartition(":")[2], row["engine"]) for row in rows}
    assert names == {("rank0", 0), ("rank1", 1)}
    assert all(0 <= row["running"] + row["waiting"] <= 4 for row in rows)
    found = of_arm(tables, "lockstep", "round_robin")
    assert [(row["endpoint"].rpartition(":")[2], row["engine"]) for row in found] == [
        ("rank0", 0), ("rank1", 1),
    ]  # fmt: skip
    for row in found:
        assert row["readings"] >= row["at_work"] >= row["idle"]
        assert row["at_work"] > 0
        assert 0 < row["running_mean"] <= row["running_max"] <= 4
        assert 1 <= row["skew"] <= 2
    assert "Lockstep" in (sweep.results / "report.md").read_text()


def test_what_the_machine_holds_afterwards_is_kept(sweep, tables):
    (row,) = tables["released"]
    assert row["trial_id"] == tables["trials"][-1]["trial_id"]
    assert (row["gpu"], row["memory_used_mib"], row["left_behind"]) == (None, None, "")
    report = (sweep.results / "report.md").read_text()
    assert "Registration" in report
    assert "2 of 2" in report
    assert "Released" in report
