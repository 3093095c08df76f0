"""What the router counts, where it sends, and what it does when ranks or clients leave."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.router.router import Router, RouterError, Settings
from tests.serving.router_rank import (
    CHUNKED,
    DEADLINE_S,
    OK,
    POST,
    Rank,
    ask,
    connect,
    eventually,
    read_until,
)

COOLDOWN_S = 0.3


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router("test", settings=Settings(cooldown_s=COOLDOWN_S))
    router.start()
    yield router
    router.stop()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.close()


def group(router: Router, ranks: list[Rank], *answers) -> str:
    """Ranks with these answers behind the router; its URL."""
    ranks.extend(Rank(answer) for answer in answers)
    router.set_endpoints([(f"rank{i}", rank.url) for i, rank in enumerate(ranks)])
    return router.status()["url"]


def tally(router: Router, rank: int = 0, role: str = "measured") -> tuple[int, ...]:
    """(forwarded, complete, failed, aborted); retried is never anything else than 0."""
    counts = router.counters()[f"rank{rank}"].get(role)
    if counts is None:
        return (0, 0, 0, 0)
    assert counts["retried"] == 0
    return tuple(counts[name] for name in ("forwarded", "complete", "failed", "aborted"))


def test_1137_requests_over_four_ranks_are_285_284_284_284(router, ranks):
    url = group(router, ranks, None, None, None, None)

    def client(requests: int) -> None:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)
        for number in range(requests):
            if number % 7 == 0:  # looking at the group must not shift the turns
                connection.request("GET", "/v1/models")
                assert connection.getresponse().read() == b"ok"
            connection.request("POST", "/v1/completions", b"{}")
            assert connection.getresponse().read() == b"ok"
        connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client, [142] * 7 + [143]))
    assert [tally(router, rank) for rank in range(4)] == [(285, 285, 0, 0)] + [(284, 284, 0, 0)] * 3
    got = [sum(request.startswith(b"POST") for request in rank.requests) for rank in ranks]
    assert got == [285, 284, 284, 284]


def test_policies_take_turns_and_each_keeps_its_own_place(router, ranks):
    url = group(router, ranks, None, None, None)
    ask(url)  # round robin: rank 0
    router.use("session")
    for _ in range(4):
        ask(url, x_session_id="a")
    before = [tally(router, rank)[0] for rank in range(3)]
    assert sorted(before) in ([0, 0, 5], [0, 1, 4])
    assert router.status()["policy"] == "session"
    router.use("round_robin")
    ask(url)  # rank 1
    router.set_endpoints([(f"rank{i}", rank.url) for i, rank in enumerate(ranks[:2])])
    ask(url)  # another list begins with its first
    grown = [tally(router, rank)[0] - before[rank] for rank in range(3)]
    assert grown == [1, 1, 0]
    with pytest.raises(ValueError, match="router policy 'fastest': choose one of round_robin"):
        router.use("fastest")


def test_counters_are_kept_by_role(router, ranks):
    url = group(router, ranks, None)
    for role, times in (("warmup", 2), ("calibration", 1), ("measured", 3)):
        for _ in range(times):
            ask(url, x_ep_ray_role=role)
    ask(url)
    ask(url, "GET", "/metrics")
    ask(url, "POST", "/tokenize")
    assert tally(router, role="warmup") == (2, 2, 0, 0)
    assert tally(router, role="calibration") == (1, 1, 0, 0)
    assert tally(router) == (4, 4, 0, 0)


@pytest.mark.parametrize("path", ["/ep_ray/status", "/status"])
def test_status_document(router, ranks, path):
    ranks.extend([Rank(), Rank()])
    router.set_endpoints([("a", ranks[0].url)], desired=2, parallelism={"dp": 2, "tp": 1})
    router.set_endpoints([("b", ranks[1].url)], desired=2)
    status, headers, body = ask(router.status()["url"], "GET", path)
    document = json.loads(body)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert document == router.status()
    assert document["policy"] == "round_robin"
    assert (document["desired_endpoints"], document["ready_endpoints"]) == (2, 1)
    assert document["parallelism"] == {"dp": 2, "tp": 1}
    seen = [(e["name"], e["registered"], e["in_selection"]) for e in document["endpoints"]]
    assert seen == [("a", False, False), ("b", True, True)]


def test_a_client_that_leaves_is_passed_on_and_counted(router, ranks):
    def answer(rank, connection, request):
        connection.sendall(CHUNKED + b"3\r\none\r\n")
        rank.wait_left(connection)

    client = connect(group(router, ranks, answer))
    client.sendall(POST)
    read_until(client, b"one\r\n")
    assert router.status()["endpoints"][0]["in_flight"] == 1
    client.close()
    assert ranks[0].left.wait(DEADLINE_S)
    assert tally(router) == (1, 0, 0, 1)
    assert router.status()["endpoints"][0]["in_flight"] == 0


def test_a_client_that_leaves_before_the_head_is_passed_on(router, ranks):
    def answer(rank, connection, request):
        rank.reached.set()
        rank.wait_left(connection)

    client = connect(group(router, ranks, answer))
    client.sendall(POST)
    assert ranks[0].reached.wait(DEADLINE_S)
    client.close()
    assert ranks[0].left.wait(DEADLINE_S)
    assert tally(router) == (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("head", "sees"),
    [
        (CHUNKED + b"3\r\n", http.client.IncompleteRead),
        (CHUNKED, http.client.IncompleteRead),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", http.client.IncompleteRead),
    ],
)
def test_a_rank_that_dies_in_the_middle_breaks_the_clients_stream(router, ranks, head, sees):
    def answer(rank, connection, request):
        connection.sendall(head + b"one\r\n" if head.endswith(b"3\r\n") else head)
        connection.close()

    url = group(router, ranks, answer)
    with pytest.raises(sees):
        ask(url)
    assert tally(router) == (1, 0, 1, 0)


def test_a_reset_of_a_close_delimited_stream_reaches_the_client_as_one(router, ranks):
    def answer(rank, connection, request):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nabc")
        assert rank.go_on.wait(DEADLINE_S)
        connection.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER of 0 s: close resets
        connection.close()

    client = connect(group(router, ranks, answer))
    client.sendall(POST)
    read_until(client, b"abc")
    ranks[0].go_on.set()
    with pytest.raises(ConnectionResetError):
        client.recv(10)
    assert tally(router) == (1, 0, 1, 0)


def test_bytes_that_are_no_http_are_a_502(router, ranks):
    url = group(router, ranks, lambda rank, connection, _: connection.sendall(b"what?\r\n\r\n"))
    status, headers, body = ask(url)
    assert (status, headers["x-ep-ray-endpoint"]) == (502, "rank0")
    assert "not an HTTP/1.1 response" in json.loads(body)["error"]["message"]
    assert tally(router) == (1, 0, 1, 0)


def test_4xx_fails_the_request_but_never_opens_the_circuit(router, ranks):
    no = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    url = group(router, ranks, lambda rank, connection, request: connection.sendall(no))
    assert [ask(url)[0] for _ in range(5)] == [404] * 5
    assert tally(router) == (5, 0, 5, 0)
    assert router.status()["endpoints"][0]["circuit"] == "closed"


def test_three_5xx_open_the_circuit_and_a_good_trial_closes_it(router, ranks):
    broken = b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n"

    def answer(rank, connection, request):
        connection.sendall(OK if rank.go_on.is_set() else broken)

    url = group(router, ranks, answer)
    assert [ask(url)[0] for _ in range(3)] == [500] * 3
    status, _, body = ask(url)
    assert status == 503
    assert "rank0 open" in json.loads(body)["error"]["message"]
    assert router.status()["endpoints"][0]["in_selection"] is False
    assert router.status()["unrouted"] == {"measured": 1}
    ranks[0].go_on.set()
    eventually(lambda: ask(url)[0] == 200)
    assert router.status()["endpoints"][0]["circuit"] == "closed"


def test_a_refused_connection_is_a_502_opens_the_circuit_and_spares_the_others(router, ranks):
    url = group(router, ranks, None, None)
    ranks[0].close()
    answers = [ask(url) for _ in range(8)]
    assert [status for status, _, _ in answers] == [502, 200, 502, 200, 502, 200, 200, 200]
    assert answers[0][1]["x-ep-ray-endpoint"] == "rank0"
    assert "cannot connect" in json.loads(answers[0][2])["error"]["message"]
    assert (tally(router, 0), tally(router, 1)) == ((3, 0, 3, 0), (5, 5, 0, 0))


def test_without_endpoints_the_answer_is_503_and_says_why(router):
    status, _, body = ask(router.status()["url"])
    assert status == 503
    assert "set_endpoints" in json.loads(body)["error"]["message"]


def test_an_idle_connection_that_the_rank_closed_is_not_used(router, ranks):
    def answer(rank, connection, request):
        connection.sendall(OK)
        if len(rank.requests) % 2:
            assert rank.go_on.wait(DEADLINE_S)
            connection.close()
            rank.reached.set()

    url = group(router, ranks, answer)
    client = connect(url)
    client.sendall(POST)
    read_until(client, b"ok")
    time.sleep(0.1)  # younger connections are reused unseen

    # The next request and the end of stream reach the loop in the same round, in this order.
    holding, held = threading.Event(), threading.Event()
    router._loop.call_soon_threadsafe(lambda: (holding.set(), held.wait(DEADLINE_S)))
    assert holding.wait(DEADLINE_S)
    client.sendall(POST)
    ranks[0].go_on.set()
    assert ranks[0].reached.wait(DEADLINE_S)
    held.set()
    assert read_until(client, b"ok").startswith(b"HTTP/1.1 200")
    assert tally(router) == (2, 2, 0, 0)
    assert len(ranks[0].connections) == 2


def test_an_endpoint_that_moved_is_reached_at_its_new_address(router, ranks):
    url = group(router, ranks, None)
    ask(url)
    other = Rank()
    router.set_endpoints([("rank0", other.url)])
    assert ask(url)[0] == 200
    assert len(other.requests) == 1
    assert tally(router) == (2, 2, 0, 0)
    other.close()


def test_stop_lets_requests_finish_and_takes_no_new_ones(router, ranks):
    def answer(rank, connection, request):
        connection.sendall(CHUNKED)
        rank.reached.set()
        assert rank.go_on.wait(DEADLINE_S)
        connection.sendall(b"0\r\n\r\n")

    url = group(router, ranks, answer)
    client, idle = connect(url), connect(url)
    client.sendall(POST)
    assert ranks[0].reached.wait(DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(router.stop, DEADLINE_S)
        assert idle.recv(1) == b""
        with pytest.raises(OSError):
            connect(url)
        ranks[0].go_on.set()
        assert read_until(client, b"0\r\n\r\n")
        assert client.recv(1) == b""
        assert stopping.result(DEADLINE_S) == 0
    assert tally(router) == (1, 1, 0, 0)


def test_stop_cuts_off_what_does_not_finish(router, ranks):
    def answer(rank, connection, request):
        rank.reached.set()
        rank.wait_left(connection)

    client = connect(group(router, ranks, answer))
    client.sendall(POST)
    assert ranks[0].reached.wait(DEADLINE_S)
    assert router.stop(0.05) == 1
    assert ranks[0].left.wait(DEADLINE_S)
    assert tally(router) == (1, 0, 0, 1)
    assert router.stop() == 0


def test_a_taken_port_is_told(router):
    port = int(router.status()["url"].rsplit(":", 1)[1])
    with pytest.raises(RouterError, match=rf"port {port}: .*in use.*router\.port="):
        Router("second", port=port).start()


def test_calls_need_a_started_router():
    with pytest.raises(RouterError, match="start"):
        Router("never").counters()


@pytest.mark.parametrize(
    ("endpoints", "match"),
    [
        ([("a", "http://h:1"), ("a", "http://h:2")], "2 times"),
        ([("a\r\nb", "http://h:1")], "header"),
        ([("a", "https://h:1")], "http://host:port"),
    ],
)
def test_endpoints_that_cannot_be_told_apart_are_refused(router, endpoints, match):
    with pytest.raises(ValueError, match=match):
        router.set_endpoints(endpoints)


def test_probe_says_what_is_wrong(router, ranks):
    down = b"HTTP/1.1 503 Down\r\ncontent-length: 0\r\n\r\n"
    group(router, ranks, None, lambda rank, connection, _: connection.sendall(down), None)
    ranks[2].close()
    answers = router.probe(DEADLINE_S)
    assert answers["rank0"] is None
    assert "HTTP 503" in answers["rank1"]
    assert str(ranks[2].port) in answers["rank2"]
