"""What several processes of one router say together, with values worked out by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.combined import combine_status, sum_counters
from serving.router.core import Core
from serving.router.endpoint import Endpoint
from serving.router.policy import RoundRobin, make_policy
from serving.router.router import Settings

RANKS = [("rank0", "http://127.0.0.1:1"), ("rank1", "http://127.0.0.1:2")]


@pytest.fixture
def processes() -> Iterator[list[Core]]:
    """Two processes of one router, without sockets."""
    loop = asyncio.new_event_loop()
    cores = [
        Core(f"router.process{i}", "http://127.0.0.1:9", loop, Settings(processes=2, process=i))
        for i in range(2)
    ]
    for core in cores:
        core.set_endpoints(RANKS, 2, {"dp": 2})
    yield cores
    loop.close()


def count(core: Core, rank: int, role: str, forwarded: int, complete: int, failed: int = 0) -> None:
    tally = core.endpoints[f"rank{rank}"].tally(role)
    tally.forwarded, tally.complete, tally.failed = forwarded, complete, failed


def combined(cores: list[Core]) -> dict[str, Any]:
    return combine_status("router", [core.status() for core in cores])


def test_counters_are_sums_by_endpoint_and_role(processes):
    one, other = processes
    count(one, 0, "measured", 143, 141, failed=1)
    count(other, 0, "measured", 142, 142)
    count(one, 1, "measured", 143, 143)
    count(other, 1, "measured", 141, 140)
    count(other, 1, "warmup", 4, 4)
    rest = {"aborted": 0, "retried": 0}
    assert sum_counters(core.counters() for core in processes) == {
        "rank0": {"measured": {"forwarded": 285, "complete": 283, "failed": 1, **rest}},
        "rank1": {
            "measured": {"forwarded": 284, "complete": 283, "failed": 0, **rest},
            "warmup": {"forwarded": 4, "complete": 4, "failed": 0, **rest},
        },
    }
    first, second = combined(processes)["endpoints"]
    assert first["counters"] == sum_counters([one.counters(), other.counters()])["rank0"]
    assert (first["in_flight"], second["in_flight"]) == (1, 1)


def test_one_process_alone_is_itself(processes):
    one = processes[0]
    count(one, 0, "measured", 3, 2)
    assert sum_counters([one.counters()]) == one.counters()
    same = one.status() | {"name": "router", "counts_of": "all processes"}
    assert combine_status("router", [one.status()]) == same


def test_a_rank_is_in_selection_only_where_every_process_selects_it(processes):
    for _ in range(3):
        processes[1].endpoints["rank1"].circuit.failed(0.0)
    document = combined(processes)
    assert (document["desired_endpoints"], document["ready_endpoints"]) == (2, 1)
    keys = ("name", "registered", "healthy", "in_selection", "circuit")
    assert [tuple(e[key] for key in keys) for e in document["endpoints"]] == [
        ("rank0", True, True, True, "closed"),
        ("rank1", True, False, False, "open"),
    ]


@pytest.mark.parametrize("claimed", [0, 1])
def test_the_worst_circuit_is_the_ranks(processes, claimed):
    for core in processes:
        for _ in range(3):
            core.endpoints["rank0"].circuit.failed(0.0)
    processes[claimed].endpoints["rank0"].circuit.claim()  # its trial request is on its way
    assert combined(processes)["endpoints"][0]["circuit"] == "open"
    processes[1 - claimed].endpoints["rank0"].circuit.succeeded()
    assert combined(processes)["endpoints"][0]["circuit"] == "half_open"


def test_a_document_says_what_its_counts_are_of(processes):
    for core in processes:
        core.unrouted["measured"] = 2
    processes[1].unrouted["warmup"] = 1
    assert [core.status()["counts_of"] for core in processes] == ["process0", "process1"]
    document = combined(processes)
    assert (document["processes"], document["counts_of"]) == (2, "all processes")
    assert document["unrouted"] == {"measured": 4, "warmup": 1}
    assert (document["name"], document["url"]) == ("router", "http://127.0.0.1:9")
    assert (document["policy"], document["parallelism"]) == ("round_robin", {"dp": 2})
    assert document["draining"] is False
    processes[1].draining = True
    assert combined(processes)["draining"] is True


def ranks(size: int) -> list[Endpoint]:
    return [Endpoint(f"rank{r}", f"http://127.0.0.1:{8000 + r}", 5.0) for r in range(size)]


@given(st.integers(1, 5), st.lists(st.integers(0, 3), max_size=200))
def test_ranks_differ_by_as_many_requests_as_there_are_processes(size, where):
    """Each process goes round for itself, whichever of them the kernel gives a request to."""
    turns = [RoundRobin() for _ in range(4)]
    for one in turns:
        one.assign(ranks(size))
    counts = Counter({f"rank{r}": 0 for r in range(size)})
    counts.update(turns[process].choose(None, 0.0).name for process in where)
    assert max(counts.values()) - min(counts.values()) <= 4


@given(st.binary(min_size=1, max_size=20), st.integers(1, 5))
def test_every_process_sends_a_session_to_the_same_rank(session, size):
    chosen = set()
    for requests_before in range(3):
        policy = make_policy("session", 0)
        policy.assign(ranks(size))
        for _ in range(requests_before):
            policy.choose(None, 0.0)
        chosen.add(policy.choose(session, 0.0).name)
    assert len(chosen) == 1
