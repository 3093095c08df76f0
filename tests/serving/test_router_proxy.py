"""Bytes through the router, between real sockets: framing, order, streaming, backpressure."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from serving.router.router import Router
from tests.serving.router_rank import CHUNKED, OK, POST, Rank, ask, connect, eventually, read_until

Behind = Callable[..., str]


@pytest.fixture
def behind() -> Iterator[Behind]:
    """Starts a router in front of ranks and gives its URL."""
    started: list[Router] = []
    ranks: list[Rank] = []

    def start(*group: Rank) -> str:
        router = Router("test")
        started.append(router)
        ranks.extend(group)
        url = router.start()
        router.set_endpoints([(f"rank{i}", rank.url) for i, rank in enumerate(group)])
        return url

    yield start
    for router in started:
        router.stop()
    for rank in ranks:
        rank.close()


def test_the_first_chunk_arrives_while_the_rank_still_generates(behind):
    def answer(rank, connection, request):
        connection.sendall(CHUNKED + b"3\r\none\r\n")
        assert rank.go_on.wait(20)
        connection.sendall(b"3\r\ntwo\r\n0\r\n\r\n")

    rank = Rank(answer)
    client = connect(behind(rank))
    client.sendall(POST)
    first = read_until(client, b"one\r\n")
    assert (
        first == CHUNKED.replace(b"OK\r\n", b"OK\r\nx-ep-ray-endpoint: rank0\r\n") + b"3\r\none\r\n"
    )
    rank.go_on.set()
    assert read_until(client, b"0\r\n\r\n") == b"3\r\ntwo\r\n0\r\n\r\n"
    assert rank.requests == [POST]


@pytest.mark.parametrize(
    "response",
    [
        OK,
        CHUNKED + b"7;a=b\r\n\r\n0\r\n\r\n\r\n0\r\ntrailer: x\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + OK,
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ],
)
def test_responses_cut_at_every_byte_pass_unchanged_on_one_connection(behind, response):
    def answer(rank, connection, request):
        for index in range(len(response)):
            connection.sendall(response[index : index + 1])

    rank = Rank(answer)
    client = connect(behind(rank))
    line = response.rindex(b"HTTP/1.1")
    line = response.index(b"\r\n", line) + 2
    expected = response[:line] + b"x-ep-ray-endpoint: rank0\r\n" + response[line:]
    for _ in range(2):
        client.sendall(POST)
        got = b""
        while len(got) < len(expected):
            got += client.recv(65536)
        assert got == expected
    assert len(rank.connections) == 1


def test_a_close_delimited_response_ends_with_the_connection(behind):
    def answer(rank, connection, request):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nabc")
        connection.close()

    status, headers, body = ask(behind(Rank(answer)))
    assert (status, headers["x-ep-ray-endpoint"], body) == (200, "rank0", b"abc")


def test_head_has_no_body_whatever_its_length_says(behind):
    rank = Rank(lambda rank, connection, request: connection.sendall(OK[:-2]))
    client = connect(behind(rank))
    for _ in range(2):
        client.sendall(b"HEAD /v1/models HTTP/1.1\r\n\r\n")
        assert b"content-length: 2" in read_until(client, b"\r\n\r\n")
    assert len(rank.connections) == 1


def test_pipelined_requests_are_answered_in_order(behind):
    def answer(rank, connection, request):
        body = request.rpartition(b"\r\n")[2]
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n" + body)

    client = connect(behind(Rank(answer), Rank(answer)))
    numbers = [b"%02d" % number for number in range(40)]
    client.sendall(b"".join(POST[:-2] + number for number in numbers))
    got = b""
    while got.count(b"\r\n\r\n") < 40 or not got.endswith(b"39"):
        got += client.recv(65536)
    assert [part[:2] for part in got.split(b"\r\n\r\n")[1:]] == numbers


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_chunked_request_bodies_pass_at_any_split(behind, size):
    request = b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"5\r\nhello\r\n4;x=y\r\n\r\n0\r\r\n0\r\n\r\n"

    def answer(rank, connection, head):
        got = b""
        while len(got) < len(body):
            got += connection.recv(100)
        rank.requests.append(got)
        connection.sendall(OK)

    rank = Rank(answer)
    client = connect(behind(rank))
    for _ in range(2):
        for index in range(0, len(request + body), size):
            client.sendall((request + body)[index : index + size])
        read_until(client, b"ok")
    assert rank.requests == [request, body] * 2


def test_expect_continue_is_the_ranks_to_answer(behind):
    def serve(connection: socket.socket) -> None:
        read_until(connection, b"\r\n\r\n")
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        read_until(connection, b"hello")
        connection.sendall(OK)

    client = connect(behind(Rank(serve=serve)))
    client.sendall(b"POST /v1/x HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
    assert read_until(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(b"hello")
    assert b"x-ep-ray-endpoint: rank0\r\n" in read_until(client, b"ok")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", b"400"),
        (b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 70000, b"431"),
    ],
)
def test_bad_requests_are_refused_and_reach_no_rank(behind, request_bytes, status):
    rank = Rank()
    client = connect(behind(rank))
    client.sendall(request_bytes)
    assert client.recv(65536).startswith(b"HTTP/1.1 " + status)
    assert rank.requests == []


def test_a_client_that_does_not_read_stops_the_rank(behind):
    total = 64 << 20
    sent = [0]

    def answer(rank, connection, request):
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while sent[0] < total:
            connection.settimeout(0.5)
            try:
                sent[0] += connection.send(b"x" * min(65536, total - sent[0]))
            except TimeoutError:
                rank.reached.set()

    rank = Rank(answer)
    client = connect(behind(rank))
    client.sendall(POST)
    assert rank.reached.wait(20)
    assert sent[0] < total // 2
    data = client.recv(65536)
    got = len(data) - data.index(b"x" * 8)
    while got < total:
        got += len(client.recv(1 << 20))
    assert got == total


def test_pipelined_requests_of_a_client_that_does_not_read_wait(behind):
    size, times = 1 << 17, 400
    response = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size
    rank = Rank(lambda rank, connection, request: connection.sendall(response))
    client = connect(behind(rank))
    client.sendall(POST * times)
    seen = -1
    while seen != len(rank.requests):
        seen = len(rank.requests)
        time.sleep(0.5)
    assert 0 < seen < times // 2
    got = 0
    while got < times * (len(response) + len(b"x-ep-ray-endpoint: rank0\r\n")):
        got += len(client.recv(1 << 20))
    assert len(rank.requests) == times


def test_a_rank_that_does_not_read_stops_the_client(behind):
    total = 64 << 20
    started, go_on = threading.Event(), threading.Event()
    head = b"POST /v1/x HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % total

    def serve(connection: socket.socket) -> None:
        started.set()
        assert go_on.wait(20)
        got = 0
        while got < total + len(head):
            got += len(connection.recv(1 << 20))
        connection.sendall(OK)

    client = connect(behind(Rank(serve=serve)))
    client.sendall(head)
    assert started.wait(20)
    client.settimeout(0.5)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < total:
            sent += client.send(b"x" * min(65536, total - sent))
    assert sent < total // 2
    client.settimeout(20)
    go_on.set()
    client.sendall(b"x" * (total - sent))
    read_until(client, b"ok")


def test_an_early_answer_leaves_the_connection_in_step(behind):
    """The rest of a refused body is skipped; the next request on the connection is served."""
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"

    def serve(connection: socket.socket) -> None:
        request = connection.recv(65536)
        connection.sendall(refusal if b"/v1/big" in request else OK)

    rank = Rank(serve=serve)
    client = connect(behind(rank))
    client.sendall(b"POST /v1/big HTTP/1.1\r\ncontent-length: 10\r\n\r\n12345")
    assert read_until(client, b"no").startswith(b"HTTP/1.1 413")
    client.sendall(b"67890" + POST)
    assert read_until(client, b"ok").startswith(b"HTTP/1.1 200")
    eventually(lambda: len(rank.connections) == 2)
