"""Whether a load can be sent at all: checked before anything starts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ep_ray.config.check_workload import twice
from ep_ray.config.schema import Api, ArrivalKind, Config, Load, PromptKind

_SHAPE = re.compile(r"([1-9]\d*|file)/([1-9]\d*|file)")
_FROM_FILE = (PromptKind.conversations, PromptKind.trace)


def lengths_of(shape: str) -> tuple[int | None, int | None]:
    """Tokens of prompt and completion of `1024/256`; None for `file`, which a file gives."""
    prompt, completion = (None if part == "file" else int(part) for part in shape.split("/"))
    return prompt, completion


def check_load(config: Config) -> Iterator[str]:
    """What is wrong with `load`, in words."""
    load = config.load
    for shape in load.shapes:
        if not _SHAPE.fullmatch(shape):
            yield f"`load.shapes={shape}`: write PROMPT/COMPLETION in tokens, for example 1024/256"
            continue
        yield from _source(load, shape)
        if sum(length or 0 for length in lengths_of(shape)) > config.model.max_model_len:
            yield (
                f"`load.shapes={shape}` is longer than model.max_model_len="
                f"{config.model.max_model_len}"
            )
    if not load.shapes:
        yield "`load.shapes` names at least one value"
    yield from twice("load.shapes", load.shapes)
    yield from _file(load)
    yield from _shared_prefix(load)
    yield from _closed(load) if load.arrival is ArrivalKind.closed else _open(load)
    if load.min_requests < 1 or load.requests_per_slot < 1:
        yield "`load.min_requests` and `load.requests_per_slot` are at least 1"
    if load.sessions < 0:
        yield f"`load.sessions={load.sessions}`: at least 0"
    if load.clients < 1:
        yield f"`load.clients={load.clients}`: at least 1"
    yield from _cancel(load)


def _source(load: Load, shape: str) -> Iterator[str]:
    prompt, completion = lengths_of(shape)
    kind = load.prompts
    if kind in _FROM_FILE and prompt is not None:
        yield (
            f"`load.shapes={shape}` with load.prompts={kind.name}, whose file gives the prompts: "
            f"write file/{completion or 'file'}"
        )
    elif kind not in _FROM_FILE and (prompt is None or completion is None):
        words = " or ".join(k.name for k in _FROM_FILE)
        yield f"`load.shapes={shape}` with load.prompts={kind.name}: only {words} read a file"


def _file(load: Load) -> Iterator[str]:
    kind = load.prompts
    if kind in _FROM_FILE and not load.file:
        yield f"`load.prompts={kind.name}` needs load.file=PATH"
    if kind is PromptKind.trace and load.api is Api.chat:
        yield (
            "`load.prompts=trace` with load.api=chat: a trace has lengths and no words, and chat "
            "takes no token ids; set load.api=completions"
        )
    if load.file and kind not in _FROM_FILE:
        words = " or ".join(k.name for k in _FROM_FILE)
        yield (
            f"`load.file={load.file}` with load.prompts={kind.name}, which reads none: choose "
            f"load.prompts={words}, or leave the file out"
        )


def _shared_prefix(load: Load) -> Iterator[str]:
    tokens = load.shared_prefix_tokens
    if load.prompts is not PromptKind.shared_prefix:
        if tokens:
            yield (
                f"`load.shared_prefix_tokens={tokens}` with load.prompts={load.prompts.name}: only "
                "load.prompts=shared_prefix reads it"
            )
    elif tokens < 1:
        yield (
            f"`load.shared_prefix_tokens={tokens}`: load.prompts=shared_prefix needs the prefix's "
            "length, at least 1"
        )
    for shape in load.shapes:
        prompt, _, completion = shape.partition("/")
        if prompt.isdecimal() and completion and 1 <= int(prompt) <= tokens:
            yield (
                f"`load.shared_prefix_tokens={tokens}` fills the prompt of load.shapes={shape}: "
                "below the prompt's length, so that each request has tokens of its own"
            )


def _cancel(load: Load) -> Iterator[str]:
    share, tokens = load.cancel_share, load.cancel_after_tokens
    if not 0 <= share <= 1:
        yield f"`load.cancel_share={share}`: a share of the measured requests, 0 to 1"
    if tokens < 1:
        yield f"`load.cancel_after_tokens={tokens}`: at least 1"
    if not share:
        if tokens != Load.cancel_after_tokens:
            yield (
                f"`load.cancel_after_tokens={tokens}` with load.cancel_share=0, which cancels no "
                "request: set load.cancel_share, or leave it out"
            )
        return
    for shape in filter(_SHAPE.fullmatch, load.shapes):
        completion = lengths_of(shape)[1]  # a file's lengths are looked at once it is read
        if completion is not None and completion <= tokens:
            yield (
                f"`load.cancel_after_tokens={tokens}` with load.shapes={shape}: below the "
                "completion's length, so that there is something left to cancel"
            )


def _closed(load: Load) -> Iterator[str]:
    if not load.concurrency:
        yield "`load.concurrency` names at least one value"
    yield from twice("load.concurrency", load.concurrency)
    for c in load.concurrency:
        if c < 1:
            yield f"`load.concurrency={c}`: at least 1"
        elif c < load.clients:
            yield (
                f"`load.concurrency={c}` with load.clients={load.clients}: each client needs a "
                "request in flight; lower load.clients, or leave this concurrency out"
            )
    if load.rate:
        yield (
            f"`load.rate={load.rate}` with load.arrival=closed, which has no rate: choose "
            "load.arrival=poisson, gamma or ramp, or leave the rate out"
        )


def _open(load: Load) -> Iterator[str]:
    kind = load.arrival
    if kind is ArrivalKind.trace and load.prompts is not PromptKind.trace:
        yield f"`load.arrival=trace` with load.prompts={load.prompts.name}: set load.prompts=trace"
    if not load.rate:
        yield f"`load.rate` is empty: load.arrival={kind.name} needs requests per second"
    yield from twice("load.rate", load.rate)
    for key, values in (("rate", load.rate), ("duration_s", [load.duration_s])):
        for value in values:
            if not (math.isfinite(value) and value > 0):
                yield f"`load.{key}={value}`: a number above 0"
    if not (math.isfinite(load.burstiness) and load.burstiness > 0):
        yield f"`load.burstiness={load.burstiness}`: a number above 0"
    elif load.burstiness != 1 and kind is not ArrivalKind.gamma:
        yield f"`load.burstiness={load.burstiness}`: only load.arrival=gamma reads it"
    if not 0 < load.ramp_from <= 1:
        yield f"`load.ramp_from={load.ramp_from}`: above 0, at most 1"
