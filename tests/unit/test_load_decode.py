"""Which chunks carry tokens, and what makes a request complete."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.load.connection import Exchange
from serving.load.decode import decode
from serving.load.records import Request, RequestRecord
from serving.load.target import Target
from sweeps.tables import REQUESTS

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


def text_event(text: str, **choice: object) -> bytes:
    return event({"choices": [{"text": text, **choice}]})


def chat_event(delta: dict[str, object], usage: int | None = None, **choice: object) -> bytes:
    content = {"choices": [{"delta": delta, **choice}]}
    return event(content | ({} if usage is None else {"usage": {"completion_tokens": usage}}))


def record_of(
    body: bytes,
    max_tokens: int = 3,
    *,
    ignore_eos: bool = True,
    cuts: list[int] = (),
    aborted: str = "",
) -> RequestRecord:
    """Record of a response with this body, read in pieces cut at `cuts`, one stamp each."""
    request = Request("id", "measured", b"{}", max_tokens, ignore_eos)
    exchange = Exchange(request, Target("h", 1, "/"), b"")
    wire = HEAD + b"content-length: %d\r\n\r\n" % len(body)
    exchange.response.feed(wire)
    edges = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for stamp, (start, stop) in enumerate(itertools.pairwise(edges), start=100):
        exchange.response.feed(body[start:stop])
        exchange.stamps.append(stamp)
        exchange.offsets.append(exchange.response.body_bytes)
    exchange.sent_ns, exchange.intended_ns = 50, 40
    exchange.end(200, aborted, aborted=bool(aborted))
    return decode(exchange, None)


CONTINUOUS = (
    chat_event({"role": "assistant", "content": ""}, usage=0)
    + chat_event({"content": "é"}, usage=1)
    + chat_event({"content": ""}, usage=2)  # half a character: a token without text
    + chat_event({"reasoning": "🙂🙂"}, usage=5)
    + chat_event({}, usage=5, finish_reason="length")
    + event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})
    + DONE
)


def test_continuous_usage_decides_first():
    record = record_of(CONTINUOUS, 5)
    assert (record.state, record.reason, record.finish_reason) == ("complete", "", "length")
    assert (record.token_rule, record.chunk_tokens) == ("continuous_usage", (1, 1, 3))
    assert (record.prompt_tokens, record.completion_tokens) == (9, 5)
    assert record.completion_tokens_source == "usage"


def test_token_ids_decide_next():
    body = (
        text_event("", token_ids=[], prompt_token_ids=[1, 2])
        + text_event("", token_ids=[5])
        + text_event("ab", token_ids=[6, 7], finish_reason="stop")
        + DONE
    )
    record = record_of(body)
    assert (record.state, record.token_rule, record.chunk_tokens) == (
        "complete",
        "token_ids",
        (1, 2),
    )
    assert (record.completion_tokens, record.completion_tokens_source) == (3, "token_ids")
    assert record.prompt_tokens == 2


@pytest.mark.parametrize("key", ["content", "reasoning", "reasoning_content"])
def test_text_decides_last_and_counts_chunks(key):
    body = (
        chat_event({"role": "assistant", "content": ""})
        + chat_event({key: "a"})
        + chat_event({key: "b"})
        + chat_event({key: None})
        + chat_event({}, finish_reason="stop")
        + DONE
    )
    record = record_of(body, 2)
    assert (record.state, record.token_rule, record.chunk_tokens) == ("complete", "text", (1, 1))
    assert (record.completion_tokens, record.completion_tokens_source) == (2, "text_chunks")


def test_usage_in_the_last_chunk_alone_is_not_continuous():
    last = {"choices": [{"text": "c", "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}
    record = record_of(text_event("a") + text_event("b") + event(last) + DONE)
    assert (record.token_rule, record.chunk_tokens) == ("text", (1, 1, 1))
    assert (record.completion_tokens, record.completion_tokens_source) == (3, "usage")


@settings(deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=80))
def test_any_split_gives_the_same_record_and_true_stamps(cuts):
    whole, split = record_of(CONTINUOUS, 5), record_of(CONTINUOUS, 5, cuts=cuts)
    assert dataclasses.replace(split, chunk_ns=()) == dataclasses.replace(whole, chunk_ns=())
    edges = sorted({len(CONTINUOUS), *(cut % (len(CONTINUOUS) + 1) for cut in cuts)} - {0})
    ends = [i + 2 for i in range(len(CONTINUOUS)) if CONTINUOUS.startswith(b"\n\n", i)]
    first_read_with = [100 + next(i for i, e in enumerate(edges) if e >= end) for end in ends]
    assert split.chunk_ns == tuple(first_read_with[1:4])


def test_an_aborted_request_keeps_what_it_received():
    record = record_of(CONTINUOUS[: CONTINUOUS.index(b"reasoning")], 5, aborted="by the client")
    assert (record.state, record.reason) == ("aborted", "by the client")
    assert (record.completion_tokens, record.chunk_tokens) == (2, (1, 1))
    assert record.finish_reason is None


def test_chunks_after_an_error_are_not_read_and_nothing_hides_it():
    ok = text_event("a", finish_reason="stop")
    for error in (
        event({"error": {"message": "no"}}),
        event({"object": "error", "message": "no"}),
        b"event: error\ndata: {}\n\n",
    ):
        record = record_of(ok + error + ok + DONE, 1)
        assert record.state == "failed"
        assert record.reason.startswith("error event: {")
        assert record.chunk_tokens == (1,)


@pytest.mark.parametrize(
    "data", [b"[1]", b"3", b'{"choices": [4]}', b'{"usage": 3}', b"\xff", b"{"]
)
def test_unreadable_events_fail_the_request(data):
    record = record_of(b"data: " + data + b"\n\n" + DONE)
    assert record.state == "failed"
    assert record.reason.startswith("malformed event: ")


def test_lengths_are_checked_only_where_the_server_must_keep_them():
    body = text_event("a", finish_reason="stop") + DONE
    assert record_of(body).reason == "expected 3 tokens, got 1"
    assert record_of(body, ignore_eos=False).state == "complete"


def test_null_fields_and_keep_alive_events_are_no_tokens():
    nothing = event({"choices": None, "usage": None, "error": None}) + b"data:\n\n: ping\n\n"
    record = record_of(nothing + text_event("a", finish_reason="stop") + nothing + DONE, 1)
    assert (record.state, record.chunk_tokens) == ("complete", (1,))


def test_a_record_is_a_row_of_the_requests_table():
    assert [f.name for f in dataclasses.fields(RequestRecord)] == REQUESTS.names[2:]
    row = {"trial_id": "t", "attempt": 0, **dataclasses.asdict(record_of(CONTINUOUS, 5))}
    import pyarrow as pa

    table = pa.Table.from_pylist([row], schema=REQUESTS)
    assert table.to_pylist() == [{**row, "chunk_ns": [100] * 3, "chunk_tokens": [1, 1, 3]}]
