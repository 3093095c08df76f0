"""A cell split between clients and put together again, with every value worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from serving.load.deal import deal, merge, shares, turns
from serving.load.records import CellRecord, Request, RequestRecord
from serving.load.target import Target

ROUTER = [Target("h", 1, "/p")]
RANKS = [Target("h", port, "/p", name=f"rank{port}") for port in range(4)]


def request(name: str, role: str = "measured") -> Request:
    return Request(name, role, b"", 1)


MEASURED = [request(f"m{i}") for i in range(6)]
WARM = [request("cal", "calibration"), request("w0", "warmup"), request("w1", "warmup")]


@pytest.mark.parametrize(
    ("concurrency", "clients", "expected"),
    [(1, 1, [1]), (4, 2, [2, 2]), (5, 2, [3, 2]), (11, 4, [3, 3, 3, 2]), (3, 3, [1, 1, 1])],
)
def test_the_concurrency_is_split_evenly_and_none_of_it_is_lost(concurrency, clients, expected):
    assert shares(concurrency, clients) == expected
    assert sum(expected) == concurrency


def test_requests_go_to_the_clients_in_turn():
    assert turns(7, clients=3, concurrency=6, targets=1) == [0, 1, 2, 0, 1, 2, 0]
    assert turns(7, clients=3, concurrency=None, targets=1) == [0, 1, 2, 0, 1, 2, 0]
    assert turns(5, clients=1, concurrency=3, targets=2) == [0] * 5


def test_a_client_with_more_places_in_flight_gets_as_many_more_requests():
    assert turns(6, clients=2, concurrency=3, targets=1) == [0, 1, 0, 0, 1, 0]
    # An open loop has no places: half each.
    assert turns(6, clients=2, concurrency=None, targets=1) == [0, 1, 0, 1, 0, 1]


def test_no_client_is_tied_to_a_target():
    # Two of each: in step, client 0 would only ever meet target 0.
    assert turns(8, clients=2, concurrency=2, targets=2) == [0, 1, 1, 0, 0, 1, 1, 0]
    # Three clients over two targets meet them all as it is.
    assert turns(6, clients=3, concurrency=3, targets=2) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(("clients", "concurrency"), [(2, 16), (3, 16), (4, 16), (4, 6), (8, 8)])
def test_every_client_meets_every_target_alike(clients, concurrency):
    rounds = 96 * concurrency
    owners = turns(rounds, clients, concurrency, len(RANKS))
    met = Counter((owner, place % len(RANKS)) for place, owner in enumerate(owners))
    for client, share in enumerate(shares(concurrency, clients)):
        expected = rounds * share // concurrency // len(RANKS)
        assert [met[client, rank] for rank in range(len(RANKS))] == [expected] * len(RANKS)


def test_a_closed_loop_is_dealt_with_what_is_not_measured_first():
    one, two = deal(ROUTER, [*MEASURED, *WARM], 5, 2)
    assert [r.request_id for r in one.requests] == ["cal", "w1", "m0", "m2", "m4", "m5"]
    assert [r.request_id for r in two.requests] == ["w0", "m1", "m3"]
    assert (one.concurrency, two.concurrency) == (3, 2)
    assert (one.arrivals_ns, two.arrivals_ns) == (None, None)
    assert one.targets == ROUTER * 6


def test_without_a_router_each_place_goes_to_its_rank_whoever_sends_it():
    parts = deal(RANKS, [*WARM, *MEASURED], 4, 2)
    sent = {
        request.request_id: target.name
        for part in parts
        for request, target in zip(part.requests, part.targets, strict=True)
    }
    order = ["cal", "w0", "w1", "m0", "m1", "m2", "m3", "m4", "m5"]
    assert [sent[name] for name in order] == [f"rank{place % 4}" for place in range(9)]


def test_an_open_loop_keeps_the_time_of_each_request():
    one, two = deal(ROUTER, [*WARM, *MEASURED], 4, 2, arrivals_ns=[10, 20, 30, 40, 50, 60])
    assert [r.request_id for r in one.requests] == ["cal", "w1", "m0", "m2", "m4"]
    assert (one.arrivals_ns, two.arrivals_ns) == ([10, 30, 50], [20, 40, 60])


def test_a_client_may_have_nothing_to_send_in_an_open_loop_and_not_in_a_closed_one():
    parts = deal(ROUTER, MEASURED[:1], 1, 3, arrivals_ns=[5])
    assert [(p.concurrency, p.targets, len(p.requests), p.arrivals_ns) for p in parts] == [
        (1, ROUTER, 1, [5]), (1, ROUTER, 0, []), (1, ROUTER, 0, []),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="concurrency 2 cannot be split between 3 clients"):
        deal(ROUTER, MEASURED, 2, 3)


def record(request: Request, sent_ns: int | None, end_ns: int, endpoint: str | None = None):
    return RequestRecord(
        request.request_id, request.role, endpoint, "complete", "", 200, "length", 1, 1, "usage",
        "continuous_usage", sent_ns or 1, sent_ns, end_ns, (end_ns,), (1,),
    )  # fmt: skip


def cell(records: list[RequestRecord], lag_ns: int, stopped: bool = False) -> CellRecord:
    return CellRecord(0, None, 0, lag_ns, 1000, 1, 17, stopped, records)


def test_the_merged_record_is_that_of_one_client():
    one = [record(WARM[0], 1, 2), record(MEASURED[0], 100, 200), record(MEASURED[2], 200, 300)]
    two = [record(WARM[1], 1, 9), record(MEASURED[1], 110, 210), record(MEASURED[3], 210, 350)]
    found = merge(ROUTER, [*WARM[:2], *MEASURED[:4]], [cell(one, 7), cell(two, 40)])
    order = ["cal", "w0", "m0", "m1", "m2", "m3"]
    assert [r.request_id for r in found.requests] == order
    assert found.requests == [one[0], two[0], one[1], two[1], one[2], two[2]]
    assert (found.first_sent_ns, found.wall_ns) == (100, 250)
    # m0 and m1 overlap, and m2 and m3 each take up where one has ended.
    assert found.in_flight_max == 2
    assert (found.client_lag_p99_ns, found.client_cpu_ns) == (40, 2000)
    assert (found.replaced_connections, found.clock_offset_ns, found.stopped) == (2, 17, False)


def test_requests_that_were_never_taken_up_are_missing_and_the_cell_is_stopped():
    one = [record(MEASURED[0], 100, 200), record(MEASURED[2], None, 250)]
    found = merge(ROUTER, MEASURED[:4], [cell(one, 1), cell([], 1, stopped=True)])
    assert [r.request_id for r in found.requests] == ["m0", "m2"]
    assert (found.wall_ns, found.in_flight_max, found.stopped) == (100, 1, True)
    nothing = merge(ROUTER, MEASURED, [cell([], 1, stopped=True)] * 2)
    assert (nothing.wall_ns, nothing.first_sent_ns, nothing.in_flight_max) == (0, None, 0)


def test_every_record_names_its_rank_even_of_a_client_that_met_only_one():
    parts = deal(RANKS, MEASURED[:4], 4, 4)
    assert [p.targets for p in parts] == [[rank] for rank in RANKS]
    records = [[record(p.requests[0], 5, 6)] for p in parts]
    records[3] = [replace(records[3][0], endpoint="as the server says")]
    found = merge(RANKS, MEASURED[:4], [cell(r, 1) for r in records])
    names = ["rank0", "rank1", "rank2", "as the server says"]
    assert [r.endpoint for r in found.requests] == names
    alone = merge(ROUTER, MEASURED[:1], [cell([record(MEASURED[0], 5, 6)], 1)])
    assert [r.endpoint for r in alone.requests] == [None]
