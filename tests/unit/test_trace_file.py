"""Traces: what is read, what is refused and where, which tokens are shared, and when they go."""

from __future__ import annotations

import json

import pytest

from serving.load.arrivals import trace_arrivals_ns
from serving.load.prompt_file import PromptFile, read_prompt_file
from serving.load.prompts import CallSpec, build_requests
from serving.load.records import Request
from serving.load.trace_file import TraceEntry, read_trace

LINES = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 3]},
    {"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [0]},
    {"timestamp": 4500.5, "input_length": 3, "output_length": 8, "hash_ids": [9]},
]


def text_of(*changes: dict[str, object]) -> str:
    """The lines; the last one changed."""
    last = LINES[-1] | (changes[0] if changes else {})
    return "\n".join(json.dumps(line) for line in [*LINES[:-1], last])


def trace() -> PromptFile:
    return PromptFile("f", "d", trace=read_trace(text_of(), "f"))


def sent(file: PromptFile, trial_id: str = "t", measured: int = 4, **counts: int) -> list[Request]:
    spec = CallSpec("m", "completions", None, None, 1000, prompts="trace", file=file)
    return build_requests(spec, seed=0, trial_id=trial_id, measured=measured, **counts)


def prompts(requests: list[Request]) -> list[list[int]]:
    return [json.loads(request.body)["prompt"] for request in requests]


def test_entries_are_read_with_their_lines(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n" + text_of() + "\n\n")
    found = read_prompt_file("trace", str(path)).trace
    assert found[0] == TraceEntry(2, 0, 1100, 5, (0, 1, 2))
    assert found[-1] == TraceEntry(5, 4500.5, 3, 8, (9,))
    assert len(found) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": -1}, "line 4: timestamp -1: asked milliseconds"),
        ({"timestamp": True}, "line 4: timestamp True: asked milliseconds"),
        ({"timestamp": 2999}, "line 4: timestamp 2999 after 3000: asked times that do not fall"),
        ({"input_length": 0}, "line 4: input_length 0: asked an integer, at least 1"),
        ({"output_length": 2.5}, "line 4: output_length 2.5: asked an integer"),
        ({"hash_ids": ["a"]}, "line 4: hash_ids: asked a list of integers"),
        ({"hash_ids": [1, 2]}, "line 4: 2 hash_ids for input_length 3: asked 1, one for each 512"),
    ],
)
def test_a_line_that_is_not_in_the_format_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_trace(text_of(change), "f")


def test_lines_without_keys_or_json_and_empty_files_are_refused():
    with pytest.raises(ValueError, match="line 1: asked an object with timestamp, input_length"):
        read_trace("{}", "f")
    with pytest.raises(ValueError, match="line 5: no JSON"):
        read_trace(text_of() + "\n{", "f")
    with pytest.raises(ValueError, match="f: no entry"):
        read_trace("\n", "f")


def test_prompts_share_tokens_exactly_where_the_trace_shares_blocks():
    requests = sent(trace())
    first, second, third, fourth = prompts(requests)
    assert [len(p) for p in (first, second, third, fourth)] == [1100, 1030, 512, 3]
    assert first[:1024] == second[:1024]
    assert first[1024:1030] != second[1024:]
    assert third == first[:512]
    assert fourth != first[:3]
    assert first[:512] != first[512:1024]
    assert [r.max_tokens for r in requests] == [5, 6, 7, 8]
    assert [r.at_ms for r in requests] == [0, 0, 3000, 4500.5]


def test_another_trial_and_what_is_not_measured_share_nothing():
    requests = sent(trace(), warmups=2, calibration=1)
    roles = [request.role for request in requests]
    found = prompts(requests)
    assert roles[:3] == ["calibration", "warmup", "warmup"]
    starts = [tuple(p[:3]) for p in (*found[:3], found[3], *prompts(sent(trace(), "u"))[:1])]
    assert len(set(starts)) == 5
    assert [request.at_ms for request in requests[:3]] == [None] * 3


def test_a_trace_that_is_too_short_or_too_long_for_the_model_is_refused():
    with pytest.raises(ValueError, match=r"`load\.file=f`: 4 entries for a cell of 5 requests"):
        sent(trace(), measured=5)
    spec = CallSpec(
        "m", "completions", None, 8, 1000, prompts="trace", file=trace(), max_model_len=1107
    )
    message = "line 1: 1108 tokens with the completion are more than model.max_model_len=1107"
    with pytest.raises(ValueError, match=message):
        build_requests(spec, seed=0, trial_id="t", measured=1)


@pytest.mark.parametrize(("api", "vocab_size"), [("chat", 1000), ("completions", None)])
def test_a_server_that_takes_no_ids_gets_no_trace(api, vocab_size):
    spec = CallSpec("m", api, None, None, vocab_size, prompts="trace", file=trace())
    with pytest.raises(ValueError, match="prompts of a trace are token ids"):
        build_requests(spec, seed=0, trial_id="t", measured=1)


def test_gaps_are_stretched_to_the_rate():
    second = 1_000_000_000
    assert trace_arrivals_ns([10, 10, 40], 4.0) == [0, 0, second // 2]
    assert trace_arrivals_ns([5, 15, 35, 65], 1.0) == [0, second // 2, 3 * second // 2, 3 * second]
    assert trace_arrivals_ns([7], 3.0) == [0]
    with pytest.raises(ValueError, match="first 2 entries of the trace arrive at the same time"):
        trace_arrivals_ns([7, 7], 3.0)
