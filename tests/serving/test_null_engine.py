"""The engine without a model: what it streams, what it logs, and what it makes of bad calls."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from serving.engine_http import get
from serving.load.client import run_cell
from serving.load.metrics import ttft_ns
from serving.load.prompts import CallSpec, build_requests
from serving.load.records import CellRecord
from serving.load.target import Target
from serving.null_engine import Running, main, running
from serving.null_events import Asked, sends
from serving.null_server import Pace

MS = 1_000_000


@pytest.fixture(scope="module")
def paced() -> Iterator[Running]:
    with running(Pace(20 * MS, 5 * MS)) as engine:
        yield engine


@pytest.fixture(scope="module")
def eager() -> Iterator[Running]:
    with running(Pace(tokens_per_send=3)) as engine:
        yield engine


def load(engine: Running, api: str, tag: str, tokens: int = 7, measured: int = 6) -> CellRecord:
    spec = CallSpec("null", api, 11, tokens, 1000 if api == "completions" else None)
    requests = build_requests(spec, seed=0, trial_id=tag, measured=measured)
    return run_cell(Target.parse(engine.url, api), requests, 3, 30.0)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_every_request_gets_its_tokens_and_is_logged_as_it_was_sent(paced, api):
    record = load(paced, api, api)
    log = paced.log()
    assert [(r.state, r.completion_tokens) for r in record.requests] == [("complete", 7)] * 6
    assert set(log) == {r.request_id for r in record.requests}
    for request in record.requests:
        sent = log[request.request_id]
        assert request.sent_ns is not None
        assert request.sent_ns <= sent.received_ns
        assert sent.first_ns - sent.received_ns >= 20 * MS
        assert sent.last_ns - sent.received_ns >= (20 + 6 * 5) * MS
        assert request.chunk_ns[0] >= sent.first_ns
        assert request.chunk_ns[-1] >= sent.last_ns
        assert (ttft_ns(request) or 0) >= 20 * MS
    assert paced.log() == {}


def test_tokens_of_one_write_are_events_of_their_own(eager):
    record = load(eager, "completions", "eager", tokens=257, measured=40)
    assert {(r.state, r.completion_tokens, len(r.chunk_ns)) for r in record.requests} == {
        ("complete", 257, 257)
    }
    assert {r.prompt_tokens for r in record.requests} == {11}


@pytest.mark.parametrize(("tokens", "each", "writes"), [(1, 1, 1), (5, 2, 3), (6, 2, 3), (2, 9, 1)])
def test_a_stream_is_cut_into_writes(tokens, each, writes):
    parts = sends(Asked(tokens, 3, True, True, False, "m"), each)
    text = b"".join(parts)
    assert len(parts) == writes
    assert text.count(b'"text":" w"') == tokens
    assert text.count(b'"finish_reason":"length"') == 1
    assert b'"usage":{"prompt_tokens":3,"completion_tokens":%d,' % tokens in text
    assert text.startswith(b"HTTP/1.1 200 OK\r\n")
    assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def ask(engine: Running, body: bytes, more: bytes = b"") -> socket.socket:
    url = urlsplit(engine.url)
    sock = socket.create_connection((url.hostname, url.port), timeout=30)
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    sock.sendall(head + body + more)
    return sock


def read_until(sock: socket.socket, end: bytes) -> bytes:
    found = b""
    while end not in found:
        data = sock.recv(65536)
        assert data, found
        found += data
    return found


def test_a_call_without_stream_is_answered_in_one_piece(eager):
    body = json.dumps({"model": "m", "prompt": "a b c", "max_tokens": 2}).encode()
    with ask(eager, body) as sock:
        answer = read_until(sock, b"}}")
    said = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert said["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert said["choices"][0]["text"] == " w w"


def test_a_second_request_that_came_with_the_first_is_answered_too(eager):
    body = json.dumps({"prompt": [1], "max_tokens": 1, "stream": True}).encode()
    again = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with ask(eager, body, again) as sock:
        found = read_until(sock, b"[DONE]")
        if found.count(b"[DONE]") < 2:
            found += read_until(sock, b"[DONE]")
    assert found.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    ("body", "why"),
    [(b"{", b"Expecting"), (b'{"max_tokens": 0}', b"1 or more"), (b"[]", b"JSON object")],
)
def test_a_bad_call_is_refused_in_words(eager, body, why):
    with ask(eager, body) as sock:
        answer = read_until(sock, why)
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_stream_whose_reader_left_is_counted_as_aborted():
    with running(Pace(MS, 60_000 * MS)) as engine:
        body = json.dumps({"prompt": [1], "max_tokens": 2, "stream": True}).encode()
        with ask(engine, body) as sock:
            read_until(sock, b'" w"')
            assert "vllm:num_requests_running 1\n" in get(f"{engine.url}/metrics", 30.0)
        while "vllm:num_requests_running 0\n" not in get(f"{engine.url}/metrics", 30.0):
            pass
        assert 'finished_reason="abort"} 1\n' in get(f"{engine.url}/metrics", 30.0)
        assert engine.log() == {}


def test_a_taken_port_and_impossible_paces_are_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--port", port]) == 1
    assert f"null engine: 127.0.0.1:{port}: " in capsys.readouterr().err
    for wrong in (["--tokens-per-send", "0"], ["--ttft-ms", "-1"], ["--itl-ms", "inf"]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2
