"""Lockstep accounting from the command line on: two engines that take requests in turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from serving.null_engine import running
from serving.null_server import Pace
from tests.sweep_process import SweepProcess, free_ports

# A request takes 0.8 s, in which it is seen three times.
TOKENS, PACE = 16, Pace(50_000_000, 50_000_000)
MEASURED = 6


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SweepProcess, list[str]]]:
    with running(PACE) as one, running(PACE) as other:
        urls = [one.url, other.url]
        sweep = SweepProcess(
            tmp_path_factory.mktemp("lockstep"),
            "+exp=attached",
            "model.vocab_size=1000",
            "cluster.dashboard=false",
            "arm.router=round_robin",
            f"arm.url={urls[0]}",
            f"arm.rank_urls=[{','.join(urls)}]",
            f"load.shapes=[12/{TOKENS}]",
            "load.concurrency=[1,2]",
            f"load.min_requests={MEASURED}",
            "load.requests_per_slot=1",
            "load.warmups=2",
            f"router.port={free_ports()}",
        )
        assert sweep.wait() == 0, sweep.output
        yield sweep, urls
        sweep.destroy()


def of_cell(sweep: SweepProcess, table: str, concurrency: int) -> list[dict[str, Any]]:
    tables = sweep.tables()
    (trial,) = [t["trial_id"] for t in tables["trials"] if t["concurrency"] == concurrency]
    return [row for row in tables[table] if row["trial_id"] == trial]


def test_one_request_at_a_time_leaves_one_of_two_ranks_idle(ran):
    sweep, urls = ran
    rows = of_cell(sweep, "lockstep", 1)
    assert [(row["endpoint"], row["engine"]) for row in rows] == [(url, None) for url in urls]
    for row in rows:
        assert row["running_max"] == 1
        assert row["idle"] / row["at_work"] == pytest.approx(0.5, abs=0.2)
    assert sum(row["running_mean"] for row in rows) == pytest.approx(1.0, abs=0.2)
    # All on one of two, but for readings that fell between two requests.
    assert rows[0]["skew"] == pytest.approx(2.0, abs=0.2)


def test_two_at_a_time_keep_both_busy(ran):
    rows = of_cell(ran[0], "lockstep", 2)
    assert [row["running_mean"] for row in rows] == pytest.approx([1.0, 1.0], abs=0.25)
    assert rows[0]["skew"] == pytest.approx(1.0, abs=0.25)


def test_readings_lie_on_the_clock_of_the_requests(ran):
    sweep, urls = ran
    sent = [row for row in of_cell(sweep, "requests", 1) if row["role"] == "measured"]
    begun, ended = min(r["sent_ns"] for r in sent), max(r["end_ns"] for r in sent)
    inside = defaultdict(list)
    for row in of_cell(sweep, "running", 1):
        if begun <= row["monotonic_ns"] <= ended:
            inside[row["endpoint"]].append(row["running"])
    found = of_cell(sweep, "lockstep", 1)
    assert {url: len(inside[url]) for url in urls} == {r["endpoint"]: r["readings"] for r in found}
    assert {url: max(inside[url]) for url in urls} == dict.fromkeys(urls, 1)


def test_the_report_shows_it_with_its_definition(ran):
    report = (ran[0].results / "report.md").read_text()
    assert "## Lockstep" in report
    assert "vllm:num_requests_running" in report
