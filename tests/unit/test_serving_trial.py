"""From a cell's record to its rows and its verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from ep_ray.config.compose import compose_all
from ep_ray.config.schema import DeviceKind
from ep_ray.transport import Evidence
from serving.engine_http import Counters
from serving.load.records import CellRecord, RequestRecord
from sweeps.host import Counts
from sweeps.outcome import Outcome, evidence_rows, trial_row, what_ran
from sweeps.plan import plan
from sweeps.serving_trial import ledger_of_cell, outcome_of_cell
from sweeps.tables import TABLES
from sweeps.trial import A2aTrial, ServingTrial, Trial

MS = 1_000_000


@cache
def trials() -> list[Trial]:
    (config,) = compose_all(["+exp=quickstart"], multirun=False)
    return plan(config, DeviceKind.cpu)


def serving_trial(concurrency: int = 4) -> ServingTrial:
    (found, *_) = [
        t for t in trials() if isinstance(t, ServingTrial) and t.concurrency == concurrency
    ]
    return found


def request(index: int, **changes: object) -> RequestRecord:
    base = RequestRecord(
        request_id=f"r{index}",
        role="measured",
        endpoint=f"rank{index % 2}",
        state="complete",
        reason="",
        http_status=200,
        finish_reason="length",
        prompt_tokens=64,
        completion_tokens=2,
        completion_tokens_source="usage",
        token_rule="continuous_usage",
        intended_ns=0,
        sent_ns=0,
        end_ns=30 * MS,
        chunk_ns=(10 * MS, 30 * MS),
        chunk_tokens=(1, 1),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def cell(requests: list[RequestRecord], in_flight: int = 4) -> CellRecord:
    return CellRecord(
        wall_ns=100 * MS,
        first_sent_ns=0,
        in_flight_max=in_flight,
        client_lag_p99_ns=2 * MS,
        client_cpu_ns=1,
        replaced_connections=0,
        clock_offset_ns=0,
        stopped=False,
        requests=requests,
    )


def routed(forwarded: int) -> dict[str, dict[str, dict[str, int]]]:
    counts = {"forwarded": forwarded, "complete": forwarded}
    return {f"rank{rank}": {"measured": dict(counts)} for rank in (0, 1)}


def engines(complete: int, aborted: int = 0) -> dict[str, Counters]:
    finished = {"length": complete, "abort": aborted}
    return {f"rank{rank}": Counters(finished) for rank in (0, 1)}


def outcome(record: CellRecord, before: Counts, after: Counts) -> Outcome:
    ledger = ledger_of_cell(record, ["rank0", "rank1"], before, after)
    return outcome_of_cell(record, serving_trial(), ledger)


BEFORE, AFTER = Counts(routed(5), engines(5)), Counts(routed(7), engines(7))


def test_a_good_cell():
    found = outcome(cell([request(i) for i in range(4)]), BEFORE, AFTER)
    assert (found.status, found.error) == ("ok", None)
    assert found.headline == {"ttft_p50_ms": 10.0, "itl_p50_ms": 20.0, "output_tok_per_s": 80.0}
    (row,) = found.rows["cells"]
    assert (row["wall_ns"], row["in_flight_max"], row["client_lag_p99_ns"]) == (100 * MS, 4, 2 * MS)
    assert row["client_lag_flag"] is True, "2 ms of lag is more than 5 % of 20 ms, and than 1 ms"
    assert [r["request_id"] for r in found.rows["requests"]] == ["r0", "r1", "r2", "r3"]
    assert found.rows["requests"][0]["chunk_ns"] == [10 * MS, 30 * MS]
    totals = [r for r in found.rows["ledger"] if r["role"] == "all"]
    assert [(r["client_sent"], r["router_forwarded"], r["engine_complete"]) for r in totals] == [
        (2, 2, 2), (2, 2, 2),
    ]  # fmt: skip


def test_rows_have_columns_of_their_tables():
    found = outcome(cell([request(0)]), BEFORE, AFTER)
    for name, rows in found.rows.items():
        assert {"trial_id", "attempt", *rows[0]} == set(TABLES[name].names)


def test_a_request_that_is_not_complete_fails_the_cell_with_its_reason():
    bad = [request(i, state="failed", reason=f"reason {i % 4}") for i in range(6)]
    found = outcome(cell([*bad, request(6)]), Counts(None, None), Counts(None, None))
    assert found.status == "failed"
    assert found.error is not None
    assert found.error.startswith("6 of 7 requests not complete: reason 0; reason 1; reason 2")
    assert "reason 3" not in found.error, "three reasons are enough"


def test_cancelled_requests_leave_a_cell_ok():
    given_up = [request(i, state="aborted", reason="cancelled by the client") for i in (4, 5)]
    requests = [*[request(i) for i in range(4)], *given_up]
    more = {f"rank{r}": {"measured": {"forwarded": 8, "complete": 7, "aborted": 1}} for r in (0, 1)}
    found = outcome(cell(requests), BEFORE, Counts(more, engines(7, aborted=1)))
    assert (found.status, found.error) == ("ok", None)
    totals = [r for r in found.rows["ledger"] if r["role"] == "all"]
    assert [(r["client_aborted"], r["router_aborted"], r["engine_aborted"]) for r in totals] == [
        (1, 1, 1), (1, 1, 1),
    ]  # fmt: skip
    stopped = [request(9, state="aborted", reason="stopped by the client")]
    found = outcome(cell([*requests, *stopped]), BEFORE, Counts(None, None))
    assert found.error is not None
    assert found.error.startswith("1 of 7 requests not complete: stopped by the client")


def test_fewer_in_flight_than_asked_fails_the_cell():
    found = outcome(cell([request(i) for i in range(4)], in_flight=3), BEFORE, AFTER)
    assert (found.status, found.error) == ("failed", "3 requests in flight at most, asked 4")


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (Counts(routed(8), engines(7)), "router forwarded 3"),
        (Counts(routed(7), engines(6)), "engine complete 1"),
    ],
)
def test_a_ledger_that_disagrees_fails_the_cell(after, says):
    found = outcome(cell([request(i) for i in range(4)]), BEFORE, after)
    assert found.status == "failed"
    assert found.error is not None
    assert "the ledger disagrees: rank0" in found.error
    assert says in found.error


def test_counters_are_differences_over_the_cell():
    record = cell([request(0), request(1)])
    before = Counts(None, engines(100, aborted=3))
    rows = ledger_of_cell(record, ["rank0", "rank1"], before, Counts(None, engines(101, 5)))
    totals = [row for row in rows if row.role == "all"]
    assert [(row.engine_complete, row.engine_aborted) for row in totals] == [(1, 2), (1, 2)]
    assert [row.router_forwarded for row in totals] == [None, None]


def test_unread_engines_leave_their_columns_empty():
    rows = ledger_of_cell(cell([request(0)]), ["rank0"], Counts(None, None), Counts(None, None))
    assert [row.engine_complete for row in rows] == [None, None]


def test_the_row_of_a_serving_trial():
    trial = serving_trial()
    row = trial_row(trial, "quickstart", Outcome("timeout", "late", {"device": "cpu x"}), 5)
    assert set(row) < set(TABLES["trials"].names)
    assert (row["status"], row["error"], row["device"]) == ("timeout", "late", "cpu x")
    assert (row["shape"], row["concurrency"], row["requests"]) == ("64/16", 4, 12)
    assert (row["tp"], row["dp"], row["ep"]) == (1, 2, 2)
    assert row["backend"] == "allgather_reducescatter"
    assert row["transport_asked"] == "auto"
    assert row["started_unix_ns"] == 5
    assert row["duration_ns"] > 0


def test_an_arm_without_expert_parallelism_has_no_ep():
    wide = next(t for t in trials() if t.arm == "wide_tp")
    row = trial_row(wide, "quickstart", Outcome(), 5)
    assert (row["tp"], row["dp"], row.get("ep"), row["backend"]) == (2, 1, None, None)


def test_the_row_of_an_all_to_all_trial():
    trial = trials()[3]
    assert isinstance(trial, A2aTrial)
    row = trial_row(trial, "quickstart", Outcome(), 5)
    assert set(row) < set(TABLES["trials"].names)
    assert (row["backend"], row["phase"], row["ep"], row["tokens"]) == ("gloo", "prefill", 4, 256)
    assert (row["hidden"], row["experts"], row["topk"]) == (1024, 16, 4)
    assert (row["dispatch_dtype"], row["combine_dtype"], row["routing"]) == (
        "fp8", "bf16", "uniform",
    )  # fmt: skip


def test_what_ran_and_evidence_are_columns():
    facts = what_ran({"b": "2", "a": "1"}, {"cores": 2}, {"rank0": {"NCCL_X": "1"}}, "H200")
    assert set(facts) < set(TABLES["trials"].names)
    assert json.loads(facts["env_json"]) == {"rank0": {"NCCL_X": "1"}}
    assert facts["versions_json"] == '{"a": "1", "b": "2"}'
    (row,) = evidence_rows([Evidence(1, "interface", "words", "tcp", 7, 5)])
    assert {"trial_id", "attempt", *row} == set(TABLES["transport"].names)
    assert (row["rank"], row["bytes_seen"], row["bytes_expected"]) == (1, 7, 5)
