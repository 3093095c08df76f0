"""Builds a cell's requests: prompts that no prefix cache can help with, of exact length.

Completions get token ids, which keep their length; chat gets text, whose length only the
server's usage knows. Prompts depend on (seed, trial, role, index), so a second trial or
repeat with the same seed has other prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.load.records import Request
from serving.load.seeded import digest, generator

# Common English words, about one token each in most vocabularies.
_TEXT = """
time year people way day man thing woman life child world school state
family student group country problem hand part place case week company system program
question work government number night point home water room mother area money story
"""
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class CallSpec:
    """What every request of a cell asks for.

    Attributes:
        model: Name that the server knows.
        api: `completions` or `chat`.
        prompt_tokens: Length of the prompt; words where the prompt is text.
        completion_tokens: Length of the completion.
        vocab_size: Ids of the model's vocabulary, for exact token-id prompts to `completions`;
            None sends text, whose length in tokens only the server's usage tells.
        excluded_ids: Ranges of ids never drawn; None takes `default_exclusion`.
        temperature: Sampling temperature.
        ignore_eos: Whether exactly `completion_tokens` are generated.
        return_token_ids: Whether the server names the token ids of each chunk.
        sessions: Sessions that requests belong to in turn; 0 for none.
        strict: Sends standard OpenAI fields only, for servers that refuse others. The length
            cannot be forced then.
    """

    model: str
    api: str
    prompt_tokens: int
    completion_tokens: int
    vocab_size: int | None = None
    excluded_ids: Sequence[range] | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    return_token_ids: bool = False
    sessions: int = 0
    strict: bool = False


def build_requests(
    spec: CallSpec,
    *,
    seed: int,
    trial_id: str,
    measured: int,
    warmups: int = 0,
    calibration: int = 0,
) -> list[Request]:
    """Requests of one cell, in the order calibration, warm-up, measured.

    Raises:
        ValueError: The API is unknown, a length is below 1, or the vocabulary is missing or
            too small to give each request its own first token.
    """
    roles = ["calibration"] * calibration + ["warmup"] * warmups + ["measured"] * measured
    keys = [f"{seed}/{trial_id}/{index}" for index in range(len(roles))]
    if min(spec.prompt_tokens, spec.completion_tokens) < 1:
        raise ValueError(
            f"prompt of {spec.prompt_tokens} and completion of {spec.completion_tokens} tokens: "
            "expected at least 1 each"
        )
    if spec.api == "completions" and spec.vocab_size is None:
        bodies: list[dict[str, Any]] = [{"prompt": _text(spec, key)} for key in keys]
    elif spec.api == "completions":
        prompts = _token_prompts(spec, f"{seed}/{trial_id}", keys)
        bodies = [{"prompt": prompt} for prompt in prompts]
    elif spec.api == "chat":
        bodies = [{"messages": [{"role": "user", "content": _text(spec, k)}]} for k in keys]
    else:
        raise ValueError(f"api {spec.api!r}: expected completions or chat")
    common = _common_fields(spec)
    return [
        Request(
            request_id=f"{trial_id}-{index}",
            role=role,
            body=json.dumps({**common, **body}, separators=(",", ":")).encode(),
            max_tokens=spec.completion_tokens,
            ignore_eos=spec.ignore_eos and not spec.strict,
            session=f"{trial_id}-s{index % spec.sessions}" if spec.sessions else None,
        )
        for index, (role, body) in enumerate(zip(roles, bodies, strict=True))
    ]


def default_exclusion(vocab_size: int) -> list[range]:
    """Ids that commonly are special: the lowest 1 % (at most 256) and the highest 1/32.

    That covers control and byte tokens at the bottom, and added tokens and unused rows at the
    top, of the Llama, Qwen and DeepSeek vocabularies.
    """
    return [range(min(256, vocab_size // 100)), range(vocab_size - vocab_size // 32, vocab_size)]


def _common_fields(spec: CallSpec) -> dict[str, Any]:
    stream_options: dict[str, bool] = {"include_usage": True}
    fields: dict[str, Any] = {
        "model": spec.model,
        "max_tokens": spec.completion_tokens,
        "temperature": spec.temperature,
        "stream": True,
        "stream_options": stream_options,
    }
    if spec.strict:
        return fields
    stream_options["continuous_usage_stats"] = True
    if spec.ignore_eos:
        fields |= {"ignore_eos": True, "min_tokens": spec.completion_tokens}
    if spec.return_token_ids:
        fields["return_token_ids"] = True
    return fields


def _token_prompts(spec: CallSpec, trial_key: str, keys: list[str]) -> list[list[int]]:
    """Random ids; within a trial no two prompts begin with the same one."""
    ids = _usable_ids(spec)
    if len(keys) > len(ids):
        raise ValueError(
            f"{len(keys)} requests need as many first tokens, the vocabulary has {len(ids)} "
            "usable ids: send fewer requests per cell or exclude fewer ids"
        )
    firsts = generator(trial_key).permutation(ids)[: len(keys)]
    prompts = []
    for first, key in zip(firsts, keys, strict=True):
        prompt = generator(key).choice(ids, spec.prompt_tokens)
        prompt[0] = first
        prompts.append(prompt.tolist())
    return prompts


def _usable_ids(spec: CallSpec) -> npt.NDArray[np.int64]:
    assert spec.vocab_size is not None
    excluded = spec.excluded_ids
    if excluded is None:
        excluded = default_exclusion(spec.vocab_size)
    banned = np.concatenate([np.arange(0), *(np.array(ids, dtype=np.int64) for ids in excluded)])
    return np.setdiff1d(np.arange(spec.vocab_size), banned)


def _text(spec: CallSpec, key: str) -> str:
    """A marker that no other request has, then random common words."""
    words = generator(key).choice(_WORDS, max(0, spec.prompt_tokens - 1))
    return " ".join([digest(key).hex()[:16], *words])
