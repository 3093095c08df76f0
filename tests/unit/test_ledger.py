"""The ledger: three counts side by side, and whether they agree."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from ep_ray.config.compose import compose_all
from ep_ray.config.schema import DeviceKind
from serving.ledger import LedgerRow, difference, disagreement, reconcile
from serving.load.records import RequestRecord
from sweeps.plan import plan
from sweeps.tables import TABLES
from sweeps.trial import ServingTrial

RANKS = ["rank0", "rank1", "rank2", "rank3"]


def record(
    endpoint: str | None = "rank0",
    role: str = "measured",
    state: str = "complete",
    sent_ns: int | None = 1,
) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        role=role,
        endpoint=endpoint,
        state=state,
        reason="",
        http_status=200,
        finish_reason="length",
        prompt_tokens=1,
        completion_tokens=1,
        completion_tokens_source="usage",
        token_rule="continuous_usage",
        intended_ns=0,
        sent_ns=sent_ns,
        end_ns=2,
        chunk_ns=(2,),
        chunk_tokens=(1,),
    )


def counts(forwarded: int, complete: int | None = None, **more: int) -> dict[str, int]:
    done = forwarded if complete is None else complete
    return {
        "forwarded": forwarded,
        "complete": done,
        "failed": 0,
        "aborted": 0,
        "retried": 0,
        **more,
    }


def by_place(rows: list[LedgerRow]) -> dict[tuple[str, str], LedgerRow]:
    found = {(row.endpoint, row.role): row for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found


def published_requests() -> list[str]:
    """Roles of all requests that an arm of the published study gets, in order."""
    (config,) = compose_all(["+exp=external_dp_tcp"], multirun=False)
    trials = [t for t in plan(config, DeviceKind.cuda) if isinstance(t, ServingTrial)]
    own = [t for t in trials if t.arm == "external_dp_tcp"]
    roles = ["calibration"] * config.load.calibration
    for trial in own:
        roles += ["warmup"] * config.load.warmups + ["measured"] * trial.requests
    return roles


def test_the_published_1137_requests_are_285_and_three_times_284():
    roles = published_requests()
    assert len(roles) == 1137 == 1088 + 12 * 4 + 1
    ranks = cycle(RANKS)
    records = [record(next(ranks), role) for role in roles]
    router: dict[str, dict[str, dict[str, int]]] = {name: {} for name in RANKS}
    engines: dict[str, dict[str, int]] = {name: {"complete": 0, "aborted": 0} for name in RANKS}
    for name, role in zip(cycle(RANKS), roles):
        entry = router[name].setdefault(role, counts(0))
        entry["forwarded"] += 1
        entry["complete"] += 1
        engines[name]["complete"] += 1
    rows = by_place(reconcile(records, RANKS, router, engines))
    totals = [rows[name, "all"] for name in RANKS]
    assert [row.client_sent for row in totals] == [285, 284, 284, 284]
    assert [row.router_forwarded for row in totals] == [285, 284, 284, 284]
    assert [row.engine_complete for row in totals] == [285, 284, 284, 284]
    assert all(row.agrees for row in rows.values())
    assert disagreement(list(rows.values())) == ""
    measured = [rows[name, "measured"].client_sent for name in RANKS]
    assert sum(n or 0 for n in measured) == 1088


def test_roles_are_kept_apart():
    records = [record(role="warmup"), record(role="measured"), record(role="measured")]
    router = {"rank0": {"warmup": counts(1), "measured": counts(2)}}
    rows = by_place(reconcile(records, ["rank0"], router, {"rank0": {"complete": 3}}))
    assert rows["rank0", "warmup"].client_sent == 1
    assert rows["rank0", "measured"].client_sent == 2
    total = rows["rank0", "all"]
    assert (total.client_sent, total.router_forwarded, total.engine_complete) == (3, 3, 3)
    assert rows["rank0", "measured"].engine_complete is None, "engines know no roles"


def test_roles_that_cancel_out_disagree():
    """The total is right: a measured request was forwarded under the role of a warm-up."""
    records = [record(role="warmup"), record(role="measured")]
    router = {"rank0": {"warmup": counts(2), "measured": counts(0)}}
    rows = by_place(reconcile(records, ["rank0"], router, {"rank0": {"complete": 2}}))
    assert [rows["rank0", role].agrees for role in ("warmup", "measured", "all")] == [False] * 3


@pytest.mark.parametrize(
    ("router", "engine"),
    [
        (counts(2), 1),  # the router sent one more
        (counts(1, 0), 1),  # the router did not see the end
        (counts(1, retried=1), 1),  # sent twice
        (counts(1), 0),  # the engine did not finish it
        (counts(1), 2),  # somebody else uses the engine
    ],
)
def test_any_count_that_differs_disagrees(router, engine):
    rows = reconcile(
        [record()], ["rank0"], {"rank0": {"measured": router}}, {"rank0": {"complete": engine}}
    )
    assert by_place(rows)["rank0", "all"].agrees is False
    assert disagreement(rows)


def test_failed_and_aborted_requests_are_counted_by_state():
    records = [
        record(state="failed"),
        record(state="aborted"),
        record(),
        record(state="failed", sent_ns=None),
    ]
    router = {"rank0": {"measured": counts(3, 1, failed=1, aborted=1)}}
    rows = by_place(reconcile(records, ["rank0"], router, {"rank0": {"complete": 1, "aborted": 1}}))
    row = rows["rank0", "measured"]
    assert (row.client_sent, row.client_complete, row.client_failed, row.client_aborted) == (
        3,
        1,
        1,
        1,
    )
    assert (row.router_failed, row.router_aborted) == (1, 1)
    assert rows["rank0", "all"].engine_aborted == 1
    assert rows["rank0", "all"].agrees is True


@pytest.mark.parametrize(
    ("router", "engine", "agrees"),
    [
        (counts(4, 2, aborted=2), {"complete": 2, "aborted": 2}, True),
        (counts(4, 2, aborted=2), {"complete": 2, "aborted": 0}, True),  # as vLLM counts
        (counts(4, 2, aborted=2), {"complete": 3, "aborted": 1}, True),  # one ended before
        (counts(4, 2, aborted=2), {"complete": 4, "aborted": 1}, False),  # one too many
        (counts(4, 2, aborted=2), {"complete": 1, "aborted": 2}, False),  # one was lost
        (counts(4, 3, aborted=1), {"complete": 3, "aborted": 1}, False),  # not passed on
        (counts(4, 2, aborted=1, failed=1), {"complete": 2, "aborted": 1}, False),
    ],
)
def test_what_the_client_aborts_may_end_at_the_engine_but_must_reach_it(router, engine, agrees):
    records = [record(state=state) for state in ("complete", "aborted") * 2]
    rows = reconcile(records, ["rank0"], {"rank0": {"measured": router}}, {"rank0": engine})
    assert by_place(rows)["rank0", "all"].agrees is agrees
    assert ("complete 2, aborted 2; router" in disagreement(rows)) is not agrees


def test_a_request_past_its_deadline_is_an_abort_to_the_router():
    router = {"rank0": {"measured": counts(1, 0, aborted=1)}}
    rows = reconcile([record(state="failed")], ["rank0"], router, {"rank0": {"complete": 0}})
    assert by_place(rows)["rank0", "all"].agrees is True


def test_a_request_without_an_endpoint_is_nobodys_where_there_are_several():
    records = [record("rank0"), record(None, state="failed")]
    router = {"rank0": {"measured": counts(1)}, "rank1": {"measured": counts(0)}}
    rows = by_place(reconcile(records, ["rank0", "rank1"], router, None))
    assert (rows["?", "measured"].client_sent, rows["?", "all"].agrees) == (1, False)
    assert rows["rank0", "all"].agrees is True
    assert rows["rank1", "all"].client_sent == 0


def test_a_request_without_an_endpoint_belongs_to_the_only_one():
    rows = by_place(
        reconcile([record(None)], ["http://h:1"], None, {"http://h:1": {"complete": 1}})
    )
    assert rows["http://h:1", "all"].agrees is True
    assert rows["http://h:1", "all"].router_forwarded is None


def test_an_endpoint_that_nobody_knows_gets_its_row():
    rows = by_place(reconcile([record("rank9")], ["rank0"], None, {"rank0": {"complete": 0}}))
    assert rows["rank9", "measured"].client_sent == 1
    assert rows["rank9", "all"].agrees is False, "no engine counted it"


def test_what_others_send_through_the_router_is_seen():
    router = {
        "rank0": {"measured": counts(1), "unknown": counts(2)},
        "rank7": {"measured": counts(1)},
        "rank8": {"measured": counts(0)},
    }
    rows = by_place(reconcile([record()], ["rank0"], router, None))
    assert rows["rank0", "measured"].agrees is True
    assert (rows["rank0", "unknown"].router_forwarded, rows["rank0", "unknown"].agrees) == (
        2,
        False,
    )
    assert rows["rank0", "all"].agrees is False
    assert rows["rank7", "all"].agrees is False
    assert ("rank8", "all") not in rows


def test_without_router_and_engines_the_client_stands_alone():
    rows = reconcile([record("a"), record("a", role="warmup")], ["a"], None, None)
    assert [(row.role, row.client_sent, row.agrees) for row in rows] == [
        ("measured", 1, True), ("warmup", 1, True), ("all", 2, True),
    ]  # fmt: skip
    assert rows[-1].engine_complete is None


@pytest.mark.parametrize(("complete", "agrees"), [((2, 1), True), ((1, 1), False), ((3, 0), True)])
@pytest.mark.parametrize("named", [None, "theirs"])
def test_behind_a_foreign_router_only_the_sums_compare(complete, agrees, named):
    urls = ["http://h:1", "http://h:2"]
    engines = {url: {"complete": n, "aborted": 0} for url, n in zip(urls, complete, strict=True)}
    rows = by_place(reconcile([record(named)] * 3, urls, None, engines))
    assert [(rows[url, "all"].engine_complete, rows[url, "all"].agrees) for url in urls] == [
        (complete[0], None), (complete[1], None),
    ]  # fmt: skip
    assert rows[urls[0], "all"].client_sent is None
    together = rows["?", "all"]
    assert (together.client_complete, together.engine_complete) == (3, sum(complete))
    assert together.agrees is agrees
    assert ("? (all)" in disagreement(list(rows.values()))) is not agrees


def test_a_disagreement_in_words():
    rows = reconcile([record()], ["rank0"], {"rank0": {"measured": counts(2)}}, None)
    assert disagreement(rows[:1]) == (
        "rank0 (measured): client sent 1, complete 1; router forwarded 2, complete 2; "
        "engine complete ?"
    )


def test_differences_of_running_counts():
    before = {"rank0": {"measured": {"forwarded": 5, "complete": 4}}}
    after = {
        "rank0": {"measured": {"forwarded": 9, "complete": 9}, "warmup": {"forwarded": 2}},
        "rank1": {"measured": {"forwarded": 3}},
    }
    assert difference(after, before) == {
        "rank0": {"measured": {"forwarded": 4, "complete": 5}, "warmup": {"forwarded": 2}},
        "rank1": {"measured": {"forwarded": 3}},
    }


def test_rows_have_the_columns_of_their_table():
    row: dict[str, Any] = reconcile([record()], ["rank0"], None, None)[0].as_dict()
    assert ["trial_id", "attempt", *row] == TABLES["ledger"].names
