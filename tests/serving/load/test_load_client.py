"""The load client against a real server on loopback that does what goes wrong in the field."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import subprocess
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
import uvloop

from serving.load.client import run_cell
from serving.load.connection import connect
from serving.load.prompts import CallSpec, build_requests
from serving.load.records import CellRecord, Request
from serving.load.target import Target
from tests.serving.load.conftest import (
    DEADLINE_S,
    STREAM_HEAD,
    FakeServer,
    chunk,
    chunked,
    event,
    reset,
    token,
    tokens,
)

COUNT = 4
GOOD = STREAM_HEAD + b"\r\n" + chunked(*tokens(COUNT), event("[DONE]"))


def requests(measured: int, warmups: int = 0, ignore_eos: bool = True) -> list[Request]:
    spec = CallSpec("m", "completions", 8, COUNT, vocab_size=1000, ignore_eos=ignore_eos)
    return build_requests(spec, seed=0, trial_id="t", measured=measured, warmups=warmups)


def run(
    server: FakeServer, measured: int = 1, *, concurrency: int = 1, warmups: int = 0, **options
) -> CellRecord:
    target = Target.parse(server.url, "completions")
    options.setdefault("request_timeout_s", DEADLINE_S)
    return run_cell(target, requests(measured, warmups), concurrency, **options)


def answer(data: bytes, *, then_close: bool = False):
    async def behave(server, call, reader, writer):
        if not then_close:
            return data
        writer.write(data)
        await writer.drain()
        writer.close()
        return None

    return behave


def test_a_good_stream_is_complete_and_its_stamps_are_in_order(fake_server):
    cell = run(fake_server(answer(GOOD)), measured=3)
    for record in cell.requests:
        assert (record.state, record.reason, record.http_status) == ("complete", "", 200)
        assert (record.finish_reason, record.token_rule) == ("length", "continuous_usage")
        assert (record.prompt_tokens, record.completion_tokens) == (7, COUNT)
        assert record.chunk_tokens == (1,) * COUNT
        times = [record.intended_ns, record.sent_ns, *record.chunk_ns, record.end_ns]
        assert times == sorted(times)
    assert cell.first_sent_ns == cell.requests[0].sent_ns
    assert cell.wall_ns == cell.requests[-1].end_ns - cell.first_sent_ns


def test_one_byte_at_a_time_changes_nothing(fake_server):
    texts = ["é", "世界", "🙂", "\u2028"]
    events = [
        token(text, so_far=i + 1, finish="stop" if i == 3 else None) for i, text in enumerate(texts)
    ]
    data = STREAM_HEAD + b"\r\n" + chunked(*events, event("[DONE]"))

    async def behave(server, call, reader, writer):
        for i in range(len(data)):
            writer.write(data[i : i + 1])
            await asyncio.sleep(0)

    (record,) = run(fake_server(behave)).requests
    assert (record.state, record.reason) == ("complete", "")
    assert record.chunk_tokens == (1, 1, 1, 1)


def test_a_chunk_with_several_tokens_counts_them(fake_server):
    events = [token(so_far=1), token(so_far=3), token(so_far=4, finish="length")]
    data = STREAM_HEAD + b"\r\n" + chunked(*events, event("[DONE]"))
    (record,) = run(fake_server(answer(data))).requests
    assert (record.state, record.chunk_tokens) == ("complete", (1, 2, 1))


BAD_STREAMS = {
    "error event: ": chunked(tokens(COUNT)[0], event({"error": {"message": "died"}})),
    "stream ended without [DONE]": chunked(*tokens(COUNT)),
    "stream ended without a finish reason": chunked(*tokens(COUNT)[:3], event("[DONE]")),
    "expected 4 tokens, got 2": chunked(*tokens(2), event("[DONE]")),
    "malformed event: {oops": chunked(event("{oops"), event("[DONE]")),
    "malformed response: malformed chunk size": b"zz\r\nwhat\r\n",
    "malformed response: malformed chunk size b'\\r\\nyy": chunk(tokens(1)[0]) + b"yy\r\n",
}


@pytest.mark.parametrize(("reason", "body"), BAD_STREAMS.items())
def test_http_200_with_a_bad_stream_is_failed_with_its_reason(fake_server, reason, body):
    (record,) = run(fake_server(answer(STREAM_HEAD + b"\r\n" + body))).requests
    assert (record.state, record.http_status) == ("failed", 200)
    assert record.reason.startswith(reason)


@pytest.mark.parametrize("cut", [5, 40, len(GOOD) // 2, len(GOOD) - 1])
def test_a_connection_closed_anywhere_in_the_response_is_failed(fake_server, cut):
    (record,) = run(fake_server(answer(GOOD[:cut], then_close=True))).requests
    assert record.state == "failed"
    assert record.reason == "connection closed before the response ended"


def test_a_stream_that_ends_with_its_connection_is_complete(fake_server):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    data = head + b"".join(tokens(COUNT)) + event("[DONE]")
    cell = run(fake_server(answer(data, then_close=True)), measured=2)
    assert [record.state for record in cell.requests] == ["complete"] * 2


def test_another_status_is_failed_with_the_body_quoted_and_the_connection_kept(fake_server):
    body = b'{"error": "busy"}' + b" " * 300
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n" % len(body)
    server = fake_server(answer(head + body))
    for record in run(server, measured=2).requests:
        assert (record.state, record.http_status) == ("failed", 503)
        assert record.reason == f"HTTP 503: {body[:200].decode()}"
    assert server.connections == 1


def test_a_json_reply_is_no_stream(fake_server):
    reply = b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"choices": []}'
    (record,) = run(fake_server(answer(reply))).requests
    assert record.reason == 'not an event stream of completions: {"choices": []}'


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_exactly_c_requests_are_in_flight_while_requests_remain(fake_server, concurrency):
    total = concurrency * 3 + 1
    full = asyncio.Condition()

    async def behave(server, call, reader, writer):
        # Nobody is answered before as many are here as can be: a client that holds fewer
        # requests in flight than asked never gets on.
        async with full:
            full.notify_all()
            await full.wait_for(
                lambda: server.in_flight == min(concurrency, total - server.answered)
            )
        return GOOD

    server = fake_server(behave)
    cell = run(server, measured=total, concurrency=concurrency)
    assert Counter(record.state for record in cell.requests) == {"complete": total}
    assert server.in_flight_max == concurrency == cell.in_flight_max
    assert server.connections == concurrency


def test_connections_are_kept_and_closed_ones_replaced(fake_server):
    server = fake_server(answer(GOOD))
    run(server, measured=12, concurrency=3, warmups=4)
    assert server.connections == 3
    closing = GOOD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    server = fake_server(answer(closing, then_close=True))
    cell = run(server, measured=6, concurrency=2)
    assert Counter(record.state for record in cell.requests) == {"complete": 6}
    assert (server.connections, cell.replaced_connections) == (6, 0)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_connection_closed_while_idle_is_replaced_before_sending(fake_server, how):
    closed = threading.Event()

    async def hang_up(server, call, reader, writer):
        writer.write(GOOD)
        await writer.drain()
        # The client has the response once it has sent the next request, to the other server.
        await asyncio.to_thread(other_called.wait, DEADLINE_S)
        reset(writer) if how == "reset" else writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()

    async def wait_for_it(server, call, reader, writer):
        other_called.set()
        await asyncio.to_thread(closed.wait, DEADLINE_S)
        closed.clear()
        other_called.clear()
        return GOOD

    other_called = threading.Event()
    first, second = fake_server(hang_up), fake_server(wait_for_it)
    targets = [Target.parse(server.url, "completions") for server in (first, second)]
    cell = run_cell(targets, requests(4), 1, DEADLINE_S)
    assert [record.reason for record in cell.requests] == [""] * 4
    assert cell.replaced_connections in (
        0,
        1,
    )  # 0 where the loop noticed before the kernel was asked
    assert (first.connections, second.connections) == (2, 1)


def test_a_reset_before_the_response_fails_the_request_which_is_never_sent_again(fake_server):
    async def behave(server, call, reader, writer):
        if len(server.calls) == 2:
            reset(writer)
            return None
        return GOOD

    server = fake_server(behave)
    cell = run(server, measured=3)
    assert [record.state for record in cell.requests] == ["complete", "failed", "complete"]
    assert cell.requests[1].reason == "connection reset before response"
    assert [call.request_id for call in server.calls] == ["t-0", "t-1", "t-2"]


def test_the_kernel_is_asked_whether_an_idle_connection_still_stands():
    async def look_before_the_loop_can_notice():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            target = Target("127.0.0.1", listener.getsockname()[1], "/")
            connection = await connect(target, DEADLINE_S)
            accepted, _ = listener.accept()
            before = connection.usable()
            accepted.close()
            after = connection.usable()
            connection.close()
        return before, after

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(look_before_the_loop_can_notice()) == (True, False)


def test_a_server_that_hangs_up_at_once_fails_every_request():
    def hang_up(listener):
        with suppress(OSError):
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up, args=[listener])
        thread.start()
        target = Target("127.0.0.1", listener.getsockname()[1], "/v1/completions")
        cell = run_cell(target, requests(20), 2, DEADLINE_S)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE_S)
    assert [record.state for record in cell.requests] == ["failed"] * 20
    assert all(record.reason.startswith("connection ") for record in cell.requests)


async def _stall(server, call, reader, writer):
    """One token, then nothing until the client goes."""
    writer.write(STREAM_HEAD + b"\r\n" + chunk(token(so_far=1)))
    with suppress(ConnectionError):  # closing with bytes unread sends a reset
        await reader.read()
    call.client_left.set()
    writer.close()


def cancelling(server: FakeServer, after_tokens: int) -> CellRecord:
    """Runs a cell at c = 2 whose request `t-1` is cancelled."""
    asked = [
        replace(r, cancel_after_tokens=after_tokens if r.request_id == "t-1" else None)
        for r in requests(4)
    ]
    return run_cell(Target.parse(server.url, "completions"), asked, 2, DEADLINE_S)


@pytest.mark.parametrize("pieces", [1, 7, 1000])  # in how many reads the tokens come
def test_a_cancelled_request_closes_its_connection_and_leaves_others_alone(fake_server, pieces):
    begun = STREAM_HEAD + b"\r\n" + b"".join(chunk(t) for t in tokens(COUNT)[:2])

    async def behave(server, call, reader, writer):
        if call.request_id != "t-1":
            return GOOD
        size = -(-len(begun) // pieces)
        for at in range(0, len(begun), size):
            writer.write(begun[at : at + size])
            await asyncio.sleep(0.001 if pieces < 100 else 0)
        with suppress(ConnectionError):  # closing with bytes unread sends a reset
            await reader.read()
        call.client_left.set()
        writer.close()
        return None

    server = fake_server(behave)
    cell = cancelling(server, after_tokens=2)
    states = {record.request_id: record.state for record in cell.requests}
    assert states == {"t-0": "complete", "t-1": "aborted", "t-2": "complete", "t-3": "complete"}
    (record,) = (record for record in cell.requests if record.cancelled)
    assert (record.request_id, record.reason) == ("t-1", "cancelled by the client")
    assert record.chunk_tokens == (1, 1)
    assert record.end_ns >= record.chunk_ns[-1]
    (call,) = (call for call in server.calls if call.request_id == "t-1")
    assert call.client_left.wait(DEADLINE_S)
    assert not cell.stopped


def test_a_request_that_ends_before_it_is_cancelled_is_complete(fake_server):
    cell = cancelling(fake_server(answer(GOOD)), after_tokens=COUNT - 1)
    assert Counter(record.state for record in cell.requests) == {"complete": 4}


def test_an_error_before_the_cancellation_is_a_failure(fake_server):
    busy = b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"
    cell = cancelling(fake_server(answer(busy)), after_tokens=1)
    assert {record.reason for record in cell.requests} == {"HTTP 503: busy"}


def test_a_request_past_its_deadline_is_failed_and_closed(fake_server):
    server = fake_server(_stall)
    (record,) = run(server, request_timeout_s=0.5).requests
    assert (record.state, record.reason) == ("failed", "timeout after 0.5 s")
    assert server.calls[0].client_left.wait(DEADLINE_S)


def test_stop_aborts_what_is_in_flight_and_returns_what_there_is(fake_server):
    stop = threading.Event()

    async def behave(server, call, reader, writer):
        if call.request_id == "t-0":
            return GOOD
        if server.in_flight == 2:
            stop.set()
        return await _stall(server, call, reader, writer)

    server = fake_server(behave)
    cell = run(server, measured=50, concurrency=2, stop=stop)
    assert cell.stopped
    states = Counter(record.state for record in cell.requests)
    assert states == {"complete": 1, "aborted": 2}
    assert {record.reason for record in cell.requests} == {"", "stopped by the client"}
    stalled = [call for call in server.calls if call.request_id != "t-0"]
    assert all(call.client_left.wait(DEADLINE_S) for call in stalled)


def test_a_stop_before_the_start_sends_nothing(fake_server):
    stop = threading.Event()
    stop.set()
    server = fake_server(answer(GOOD))
    cell = run(server, measured=2, stop=stop)
    assert (cell.requests, cell.wall_ns, cell.stopped, server.calls) == ([], 0, True, [])


def test_a_refused_connection_fails_every_request_without_sending_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        target = Target("127.0.0.1", taken.getsockname()[1], "/v1/completions")
        cell = run_cell(target, requests(3), 2, DEADLINE_S)
    assert {(r.state, r.reason, r.sent_ns) for r in cell.requests} == {
        ("failed", "connection refused", None)
    }
    assert (len(cell.requests), cell.wall_ns, cell.in_flight_max) == (3, 0, 0)


def test_warmups_end_before_measured_requests_start_and_roles_are_sent(fake_server):
    order = []

    async def behave(server, call, reader, writer):
        order.append((call.headers["x-ep-ray-role"], "start"))
        await asyncio.sleep(0.01)
        order.append((call.headers["x-ep-ray-role"], "end"))
        return GOOD

    server = fake_server(behave)
    cell = run(
        server,
        measured=4,
        warmups=3,
        concurrency=2,
        extra_headers={"X-More": "1", "X-Ep-Ray-Role": "x"},
    )
    assert [role for role, _ in order] == ["warmup"] * 6 + ["measured"] * 8
    assert {record.request_id for record in cell.requests} == {c.request_id for c in server.calls}
    assert all(call.headers["x-more"] == "1" for call in server.calls)
    measured = [record for record in cell.requests if record.role == "measured"]
    assert cell.first_sent_ns == min(record.sent_ns for record in measured)


def test_records_come_in_the_order_of_sending_however_requests_are_listed(fake_server):
    target = Target.parse(fake_server(answer(GOOD)).url, "completions")
    cell = run_cell(target, requests(2, warmups=2)[::-1], 1, DEADLINE_S)
    assert [record.role for record in cell.requests] == ["warmup"] * 2 + ["measured"] * 2
    assert [record.request_id for record in cell.requests] == ["t-1", "t-0", "t-3", "t-2"]


def test_the_endpoint_is_what_the_router_says(fake_server):
    named = GOOD.replace(b"\r\n\r\n", b"\r\nX-EP-Ray-Endpoint: rank-3\r\n\r\n", 1)
    cell = run(fake_server(answer(named)))
    assert cell.requests[0].endpoint == "rank-3"
    assert run(fake_server(answer(GOOD))).requests[0].endpoint is None


def test_several_targets_take_turns_and_name_the_endpoint(fake_server):
    servers = [fake_server(answer(GOOD)) for _ in range(3)]
    targets = [
        Target.parse(server.url, "completions", f"rank{i}") for i, server in enumerate(servers)
    ]
    cell = run_cell(targets, requests(7), 4, DEADLINE_S)
    names = [record.endpoint for record in cell.requests]
    assert names == ["rank0", "rank1", "rank2", "rank0", "rank1", "rank2", "rank0"]
    assert [len(server.calls) for server in servers] == [3, 2, 2]


def test_prompts_arrive_with_their_exact_length_and_their_own_first_token(fake_server):
    server = fake_server(answer(GOOD))
    run(server, measured=9, warmups=4, concurrency=3)
    prompts = [call.body["prompt"] for call in server.calls]
    assert {len(prompt) for prompt in prompts} == {8}
    assert len({prompt[0] for prompt in prompts}) == 13
    body = server.calls[0].body
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (4, 4, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_a_cell_runs_in_any_thread_and_leaves_the_collector_as_it_was(fake_server):
    cells = []
    server = fake_server(answer(GOOD))
    thread = threading.Thread(target=lambda: cells.append(run(server, measured=2)))
    thread.start()
    thread.join(DEADLINE_S)
    assert [record.state for record in cells[0].requests] == ["complete"] * 2
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert cells[0].client_cpu_ns > 0


def test_https(fake_server, tmp_path, monkeypatch):
    pem = tmp_path / "server.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=DNS:localhost", "-keyout", pem, "-out", pem],
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    server = fake_server(answer(GOOD), context)
    (untrusted,) = run(server).requests
    assert untrusted.state == "failed"
    assert "certificate" in untrusted.reason
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    assert [record.reason for record in run(server, measured=3).requests] == [""] * 3


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://h:81", Target("h", 81, "/v1/chat/completions")),
        ("http://h/v1/", Target("h", 80, "/v1/chat/completions")),
        ("https://h/pre/v1", Target("h", 443, "/pre/v1/chat/completions", tls=True)),
        ("http://[::1]:9", Target("::1", 9, "/v1/chat/completions")),
    ],
)
def test_base_urls(url, found):
    assert Target.parse(url, "chat") == found


@pytest.mark.parametrize(("url", "api"), [("h:80", "chat"), ("ftp://h", "chat"), ("http://h", "x")])
def test_what_cannot_be_called_is_refused(url, api):
    with pytest.raises(ValueError, match="expected"):
        Target.parse(url, api)


def test_repeated_ids_and_empty_loops_are_refused():
    target = Target("127.0.0.1", 9, "/")
    for twice, concurrency in ((2, 1), (1, 0)):
        with pytest.raises(ValueError, match="unique ids"):
            run_cell(target, requests(1) * twice, concurrency, 1.0)


def answer_when_all_are_there(count):
    """No measured request is answered before as many are in flight."""
    there = asyncio.Event()

    async def behave(server, call, reader, writer):
        if call.headers["x-ep-ray-role"] == "measured":
            if server.in_flight == count:
                there.set()
            await there.wait()
        return GOOD

    return behave


def test_an_open_loop_sends_at_its_times_however_slow_the_server_is(fake_server):
    gap_ns = 20_000_000
    arrivals = [gap_ns * number for number in range(10)]
    server = fake_server(answer_when_all_are_there(10))
    cell = run(server, 10, warmups=2, arrivals_ns=arrivals)
    measured = [r for r in cell.requests if r.role == "measured"]
    assert [r.state for r in measured] == ["complete"] * 10
    assert [r.intended_ns - measured[0].intended_ns for r in measured] == arrivals
    assert all(r.sent_ns >= r.intended_ns for r in measured)
    assert cell.in_flight_max == server.in_flight_max == 10
    lates = sorted(r.sent_ns - r.intended_ns for r in measured)
    assert cell.client_lag_p99_ns >= lates[-2]
    warm = [r for r in cell.requests if r.role == "warmup"]
    assert max(r.end_ns for r in warm) <= measured[0].intended_ns


def test_an_open_loop_that_is_stopped_sends_no_more(fake_server):
    stop = threading.Event()

    async def stop_at_the_second(server, call, reader, writer):
        if len(server.calls) == 2:
            stop.set()
        return GOOD

    arrivals = [0, 50_000_000, int(1e9 * DEADLINE_S)]
    cell = run(fake_server(stop_at_the_second), 3, arrivals_ns=arrivals, stop=stop)
    assert cell.stopped
    assert len(cell.requests) == 2
    assert {r.state for r in cell.requests} <= {"complete", "aborted"}


def test_each_measured_request_needs_its_time(fake_server):
    with pytest.raises(ValueError, match="2 arrivals for 3 measured requests"):
        run(fake_server(answer(GOOD)), 3, warmups=1, arrivals_ns=[0, 1])
