"""Builds a cell's requests: prompts that no prefix cache can help with, or only as far as asked.

Token ids keep their exact length; the length of text only the server's usage knows. Prompts
depend on (seed, trial, role, index), so a second trial or repeat with the same seed has other
prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.load.cancel import cancelled_places
from serving.load.drafts import text_prompts, token_prompts, usable_ids
from serving.load.file_drafts import (
    Draft,
    conversation_drafts,
    fitting,
    trace_drafts,
    trace_part,
)
from serving.load.prompt_file import PromptFile
from serving.load.records import Request

PROMPTS = ("token_ids", "text", "shared_prefix", "conversations", "trace")


@dataclass(frozen=True, slots=True)
class CallSpec:
    """What every request of a cell asks for.

    Attributes:
        model: Name that the server knows.
        api: `completions` or `chat`.
        prompt_tokens: Length of the prompt; words where the prompt is text; None where `file`
            gives it.
        completion_tokens: Length of the completion; None where `file` gives it.
        prompts: `token_ids`; `text`; `shared_prefix`, which is ids where they can be sent;
            `conversations` of `file`; or `trace`, ids as `file` shares them.
        shared_prefix_tokens: First tokens, or words, that are the same in all of the cell.
        vocab_size: Ids of the model's vocabulary, for exact token-id prompts to `completions`;
            None sends text, whose length in tokens only the server's usage tells.
        excluded_ids: Ranges of ids never drawn; None takes `default_exclusion`.
        temperature: Sampling temperature.
        ignore_eos: Whether exactly `completion_tokens` are generated.
        return_token_ids: Whether the server names the token ids of each chunk.
        sessions: Sessions that requests belong to in turn; 0 for none.
        strict: Sends standard OpenAI fields only, for servers that refuse others. The length
            cannot be forced then.
        file: What `conversations` or a `trace` are taken from.
        draw: Names their order, and which requests are cancelled; calls with the same name do
            the same.
        max_model_len: Longest prompt + completion of the model, in tokens; None where not known.
        cancel_share: Share of the measured requests that the client cancels.
        cancel_after_tokens: Tokens after which it does.
    """

    model: str
    api: str
    prompt_tokens: int | None
    completion_tokens: int | None
    vocab_size: int | None = None
    excluded_ids: Sequence[range] | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    return_token_ids: bool = False
    sessions: int = 0
    strict: bool = False
    prompts: str = "token_ids"
    shared_prefix_tokens: int = 0
    file: PromptFile | None = None
    draw: str = ""
    max_model_len: int | None = None
    cancel_share: float = 0.0
    cancel_after_tokens: int = 0

    @property
    def sends_ids(self) -> bool:
        """Whether prompts travel as token ids; chat takes text only."""
        ids_known = self.vocab_size is not None and self.api == "completions"
        return ids_known and self.prompts in ("token_ids", "shared_prefix", "trace")

    @property
    def sent(self) -> str:
        """What prompts really are: `text` where ids were asked and cannot be sent."""
        asked_ids = self.prompts == "token_ids"
        return "text" if asked_ids and not self.sends_ids else self.prompts


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
        ValueError: The API or the kind of prompts is unknown, a length is missing or below 1, the
            prefix fills the prompt, the vocabulary is too small to give each request its own
            token, nothing of the file fits the model, or too few requests are long enough to be
            cancelled.
    """
    roles = ["calibration"] * calibration + ["warmup"] * warmups + ["measured"] * measured
    _check(spec)
    drafts = _drafts(spec, f"{seed}/{trial_id}", roles)
    cancelled = _cancelled(spec, drafts[-measured:] if measured else [])
    before = len(roles) - measured
    return [
        Request(
            request_id=f"{trial_id}-{index}",
            role=role,
            body=json.dumps(_body(spec, draft), separators=(",", ":")).encode(),
            max_tokens=draft.completion_tokens,
            ignore_eos=spec.ignore_eos and not spec.strict,
            session=f"{trial_id}-s{index % spec.sessions}" if spec.sessions else None,
            at_ms=draft.at_ms,
            cancel_after_tokens=spec.cancel_after_tokens if index - before in cancelled else None,
        )
        for index, (role, draft) in enumerate(zip(roles, drafts, strict=True))
    ]


def _cancelled(spec: CallSpec, measured: Sequence[Draft]) -> frozenset[int]:
    lengths = [draft.completion_tokens for draft in measured]
    key = f"{spec.draw}/cancelled"
    return cancelled_places(lengths, spec.cancel_share, spec.cancel_after_tokens, key)


def _check(spec: CallSpec) -> None:
    if spec.api not in ("completions", "chat"):
        raise ValueError(f"api {spec.api!r}: expected completions or chat")
    if spec.prompts not in PROMPTS:
        raise ValueError(f"prompts {spec.prompts!r}: expected one of {', '.join(PROMPTS)}")
    lengths = [n for n in (spec.prompt_tokens, spec.completion_tokens) if n is not None]
    if (len(lengths) < 2 or spec.prompts == "trace") and spec.file is None:
        raise ValueError(f"prompts {spec.prompts!r} without a file: expected one, or both lengths")
    if min(lengths, default=1) < 1:
        raise ValueError(
            f"prompt of {spec.prompt_tokens} and completion of {spec.completion_tokens} tokens: "
            "expected at least 1 each"
        )
    if spec.prompt_tokens and not 0 <= spec.shared_prefix_tokens < spec.prompt_tokens:
        raise ValueError(
            f"shared prefix of {spec.shared_prefix_tokens} tokens: at least one of the prompt's "
            f"{spec.prompt_tokens} is the request's own"
        )


def _drafts(spec: CallSpec, trial_key: str, roles: Sequence[str]) -> list[Draft]:
    keys = [f"{trial_key}/{index}" for index in range(len(roles))]
    if spec.prompts == "trace":
        return _trace(spec, trial_key, roles, keys)
    if spec.file is not None:
        choices = fitting(spec.file, spec.completion_tokens, spec.max_model_len)
        return conversation_drafts(choices, spec.draw, roles, keys, spec.completion_tokens)
    assert spec.prompt_tokens is not None
    assert spec.completion_tokens is not None
    lengths = spec.prompt_tokens, spec.shared_prefix_tokens
    prompts: Sequence[str | list[int]]
    if spec.sends_ids:
        assert spec.vocab_size is not None
        ids = usable_ids(spec.vocab_size, spec.excluded_ids)
        prompts = token_prompts(ids, trial_key, keys, *lengths)
    else:
        prompts = text_prompts(trial_key, keys, *lengths)
    return [Draft(prompt, spec.completion_tokens) for prompt in prompts]


def _trace(
    spec: CallSpec, trial_key: str, roles: Sequence[str], keys: Sequence[str]
) -> list[Draft]:
    assert spec.file is not None, "checked"
    if not spec.sends_ids or spec.vocab_size is None:
        raise ValueError("prompts of a trace are token ids: they need completions and a vocabulary")
    measured, length = roles.count("measured"), spec.completion_tokens
    part = trace_part(spec.file, measured, length, spec.max_model_len)
    ids = usable_ids(spec.vocab_size, spec.excluded_ids)
    return trace_drafts(part, ids, trial_key, roles, keys, length)


def _body(spec: CallSpec, draft: Draft) -> dict[str, Any]:
    stream_options: dict[str, bool] = {"include_usage": True}
    fields: dict[str, Any] = {
        "model": spec.model,
        "max_tokens": draft.completion_tokens,
        "temperature": spec.temperature,
        "stream": True,
        "stream_options": stream_options,
    }
    if spec.api == "chat":
        fields["messages"] = [{"role": "user", "content": draft.prompt}]
    else:
        fields["prompt"] = draft.prompt
    if spec.strict:
        return fields
    stream_options["continuous_usage_stats"] = True
    if spec.ignore_eos:
        fields |= {"ignore_eos": True, "min_tokens": draft.completion_tokens}
    if spec.return_token_ids:
        fields["return_token_ids"] = True
    return fields
