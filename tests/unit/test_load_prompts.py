"""Prompts: exact lengths, and no two that share a first token."""

from __future__ import annotations

import json

import pytest

from serving.load.drafts import default_exclusion
from serving.load.prompts import CallSpec, build_requests
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
        (CallSpec("m", "chat", 4, 4, prompts="songs"), "expected one of token_ids, text"),
        (CallSpec("m", "chat", 4, 4, shared_prefix_tokens=4), "shared prefix of 4 tokens"),
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


def parts(spec: CallSpec, **which) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Each prompt's first 24 tokens or words, and the others."""
    found = []
    for body in bodies(spec, **which):
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        units = tuple(map(str, prompt if isinstance(prompt, list) else prompt.split()))
        found.append((units[:24], units[24:]))
    return found


@pytest.mark.parametrize(
    ("api", "vocab_size"), [("completions", 1024), ("completions", None), ("chat", 1024)]
)
def test_a_shared_prefix_is_common_to_a_cell_and_ends_where_it_should(api, vocab_size):
    spec = CallSpec("m", api, 64, 16, vocab_size, prompts="shared_prefix", shared_prefix_tokens=24)
    cells = [parts(spec, trial_id=trial) for trial in ("t", "u")]
    cells.append(parts(spec, seed=1))
    prefixes = [{prefix for prefix, _ in cell} for cell in cells]
    assert [len(prefix) for prefix in prefixes] == [1, 1, 1]
    assert len(set.union(*prefixes)) == 3, "another trial has another prefix"
    for cell in cells:
        assert {len(rest) for _, rest in cell} == {40}
        assert len({rest[0] for _, rest in cell}) == len(cell), "the prefix does not go on"


def test_text_is_sent_though_ids_could_be_and_may_end_by_itself():
    spec = CallSpec("m", "completions", 12, 4, 1024, prompts="text", ignore_eos=False)
    found = bodies(spec) + bodies(spec, trial_id="u")
    texts = [body["prompt"].split() for body in found]
    assert {len(words) for words in texts} == {12}
    assert len({words[0] for words in texts}) == 100, "a marker of each request and trial"
    assert not {"ignore_eos", "min_tokens"} & set().union(*found)


@pytest.mark.parametrize(
    ("api", "vocab_size", "asked", "sent"),
    [
        ("completions", 1024, "token_ids", "token_ids"),
        ("completions", None, "token_ids", "text"),
        ("chat", 1024, "token_ids", "text"),
        ("completions", 1024, "text", "text"),
        ("chat", None, "shared_prefix", "shared_prefix"),
    ],
)
def test_a_call_says_what_its_prompts_really_are(api, vocab_size, asked, sent):
    spec = CallSpec("m", api, 4, 4, vocab_size, prompts=asked)
    assert spec.sent == sent
    (body,) = bodies(spec, measured=1)
    assert isinstance(body.get("prompt"), list) is (sent == "token_ids")
