"""Prompts: exact lengths, and no two that share a first token."""

from __future__ import annotations

import json

import pytest

from serving.load.prompts import CallSpec, build_requests, default_exclusion
from serving.load.target import Target, request_bytes

SPEC = CallSpec("m", "completions", 64, 16, vocab_size=1024)


def bodies(spec: CallSpec = SPEC, seed: int = 0, trial_id: str = "t", measured: int = 50):
    requests = build_requests(spec, seed=seed, trial_id=trial_id, measured=measured)
    return [json.loads(request.body) for request in requests]


def test_lengths_are_exact_first_tokens_differ_and_special_ids_are_avoided():
    prompts = [body["prompt"] for body in bodies(measured=300)]
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({prompt[0] for prompt in prompts}) == 300
    used = {token for prompt in prompts for token in prompt}
    low, high = default_exclusion(1024)
    assert min(used) == low.stop == 10
    assert max(used) == high.start - 1 == 991


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_prompt_is_not_reused_by_another_trial_or_seed_but_is_reproducible(api):
    spec = CallSpec("m", api, 64, 16, vocab_size=1024)
    key = "prompt" if api == "completions" else "messages"

    def prompts(**which):
        return [json.dumps(body[key]) for body in bodies(spec, **which)]

    first = prompts()
    assert first == prompts()
    every = first + prompts(trial_id="t2") + prompts(seed=1)
    assert len(set(every)) == 150


def test_a_block_of_tokens_is_never_shared_between_trials():
    blocks = [tuple(b["prompt"][:16]) for t in ("a", "b", "c") for b in bodies(trial_id=t)]
    assert len(set(blocks)) == 150


def test_chat_puts_its_unique_marker_in_front():
    texts = [b["messages"][0]["content"] for b in bodies(CallSpec("m", "chat", 12, 4))]
    assert {len(text.split()) for text in texts} == {12}
    assert len({text.split()[0] for text in texts}) == 50


def test_roles_come_in_order_with_unique_ids():
    requests = build_requests(SPEC, seed=0, trial_id="t", measured=3, warmups=2, calibration=1)
    assert [r.role for r in requests] == ["calibration"] + ["warmup"] * 2 + ["measured"] * 3
    assert [r.request_id for r in requests] == [f"t-{i}" for i in range(6)]
    assert {(r.max_tokens, r.ignore_eos) for r in requests} == {(16, True)}


def test_fields_of_a_full_and_of_a_strict_call():
    full = CallSpec("m", "completions", 4, 16, vocab_size=1024, return_token_ids=True)
    (body,) = bodies(full, measured=1)
    body.pop("prompt")
    assert body == {
        "model": "m",
        "max_tokens": 16,
        "min_tokens": 16,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    strict = CallSpec("m", "chat", 4, 16, strict=True, return_token_ids=True)
    (request,) = build_requests(strict, seed=0, trial_id="t", measured=1)
    body = json.loads(request.body)
    assert set(body) == {
        "model", "messages", "max_tokens", "temperature", "stream", "stream_options"
    }  # fmt: skip
    assert body["stream_options"] == {"include_usage": True}
    assert not request.ignore_eos


def test_an_exclusion_of_ones_own_is_kept():
    spec = CallSpec(
        "m", "completions", 200, 1, vocab_size=20, excluded_ids=[range(5), range(9, 20)]
    )
    assert {token for body in bodies(spec, measured=4) for token in body["prompt"]} == {5, 6, 7, 8}


def test_without_a_vocabulary_completions_get_unique_text():
    prompts = [body["prompt"] for body in bodies(CallSpec("m", "completions", 6, 4), measured=8)]
    assert all(len(prompt.split()) == 6 for prompt in prompts)
    assert len({prompt.split()[0] for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (CallSpec("m", "completions", 4, 4, vocab_size=40), "50 requests need"),
        (CallSpec("m", "completions", 0, 4, vocab_size=1024), "at least 1"),
        (CallSpec("m", "embeddings", 4, 4), "expected completions or chat"),
    ],
)
def test_what_cannot_be_built_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        bodies(spec)


def test_requests_belong_to_sessions_in_turn_and_say_so_on_the_wire():
    spec = CallSpec("m", "completions", 4, 4, vocab_size=1024, sessions=2)
    requests = build_requests(spec, seed=0, trial_id="t", measured=3)
    assert [request.session for request in requests] == ["t-s0", "t-s1", "t-s0"]
    target = Target.parse("http://127.0.0.1:1", "completions")
    assert b"\r\nx-session-id: t-s1\r\n" in request_bytes(target, requests[1], {})
    (alone,) = build_requests(SPEC, seed=0, trial_id="t", measured=1)
    assert b"x-session-id" not in request_bytes(target, alone, {})
