"""Reads a finished exchange: which chunks carry tokens, and whether the request is complete.

Runs after the cell has ended, so none of it costs time while requests are in flight.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from serving.load.connection import Exchange
from serving.load.records import RequestRecord
from serving.load.sse import Event, split_events

_QUOTED_BYTES = 200


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event that holds a choice.

    Attributes:
        end: Offset in the body just after the event.
        has_text: Whether it has text or reasoning text.
        token_ids: Number of its token ids; None where the server sends none.
        completion_tokens: Tokens generated so far, from continuous usage; None without it.
    """

    end: int
    has_text: bool
    token_ids: int | None
    completion_tokens: int | None


@dataclass(slots=True)
class Stream:
    """What an event stream said.

    Attributes:
        chunks: Events that hold a choice, in order.
        done: Whether the end marker came.
        error: What an error event or an unreadable event said; empty if there was none.
        finish_reason: Last one given.
        prompt_tokens: From usage, else from the prompt's token ids.
        usage_tokens: Completion tokens of the last usage.
    """

    chunks: list[Chunk] = field(default_factory=list)
    done: bool = False
    error: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    usage_tokens: int | None = None


def decode(exchange: Exchange, target_name: str | None) -> RequestRecord:
    """Record of a finished exchange.

    Args:
        exchange: What went out and what came back.
        target_name: Endpoint to name where the response names none.
    """
    response = exchange.response
    body = b"".join(response.body)
    stream = read_stream(split_events(body)) if response.status == 200 else Stream()
    rule, carried = token_chunks(stream.chunks)
    tokens, source = _completion_tokens(stream, rule, carried)
    state, reason = _state(exchange, stream, body, tokens)
    reads = [bisect_left(exchange.offsets, end) for end, _ in carried]
    return RequestRecord(
        request_id=exchange.request.request_id,
        role=exchange.request.role,
        endpoint=response.headers.get("x-ep-ray-endpoint", target_name),
        state=state,
        reason=reason,
        http_status=response.status or None,
        finish_reason=stream.finish_reason,
        prompt_tokens=stream.prompt_tokens,
        completion_tokens=tokens,
        completion_tokens_source=source,
        token_rule=rule,
        intended_ns=exchange.intended_ns,
        sent_ns=exchange.sent_ns,
        end_ns=exchange.end_ns,
        chunk_ns=tuple(exchange.stamps[read] for read in reads),
        chunk_tokens=tuple(count for _, count in carried),
    )


def read_stream(events: Iterable[Event], stream: Stream | None = None) -> Stream:
    """Reads events up to the end marker or the first error; goes on with `stream` if given."""
    stream = stream or Stream()
    for event in events:
        if event.data == b"[DONE]":
            stream.done = True
            break
        if event.data:
            stream.error = _read_event(stream, event)
        if stream.error:
            break
    return stream


def _read_event(stream: Stream, event: Event) -> str:
    """Adds one event to the stream; gives the error that it is, or an empty string."""
    try:
        content = json.loads(event.data)
        return _read_content(stream, event, content)
    except (ValueError, TypeError, AttributeError):  # not JSON, or not of the shape we know
        return f"malformed event: {_quote(event.data)}"


def _read_content(stream: Stream, event: Event, content: dict[str, Any]) -> str:
    if content.get("error") or content.get("object") == "error" or event.name == b"error":
        return f"error event: {_quote(event.data)}"
    usage = content.get("usage") or {}
    stream.usage_tokens = usage.get("completion_tokens", stream.usage_tokens)
    stream.prompt_tokens = usage.get("prompt_tokens", stream.prompt_tokens)
    for choice in (content.get("choices") or ())[:1]:
        _read_choice(stream, choice, event.end, usage.get("completion_tokens"))
        if stream.prompt_tokens is None and (ids := _prompt_ids(content, choice)):
            stream.prompt_tokens = len(ids)
    return ""


def _read_choice(stream: Stream, choice: dict[str, Any], end: int, so_far: int | None) -> None:
    delta = choice.get("delta") or {}
    text = (
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning")
        or delta.get("reasoning_content")
    )
    ids = choice.get("token_ids")
    stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
    stream.chunks.append(Chunk(end, bool(text), None if ids is None else len(ids), so_far))


def _prompt_ids(content: dict[str, Any], choice: dict[str, Any]) -> list[int] | None:
    # Completions name them in the choice, chat in the chunk.
    return choice.get("prompt_token_ids") or content.get("prompt_token_ids")


def token_chunks(chunks: list[Chunk]) -> tuple[str | None, list[tuple[int, int]]]:
    """Which chunks carry tokens, and how many: (rule, [(end offset, tokens), ...]).

    Continuous usage decides if every chunk with a choice has it (a server that puts usage
    only into the last one does not report continuously), else token ids if there are any,
    else text, which counts one token per chunk.
    """
    if not chunks:
        return None, []
    if all(chunk.completion_tokens is not None for chunk in chunks):
        return "continuous_usage", list(_rises(chunks))
    if any(chunk.token_ids for chunk in chunks):
        return "token_ids", [(chunk.end, chunk.token_ids) for chunk in chunks if chunk.token_ids]
    return "text", [(chunk.end, 1) for chunk in chunks if chunk.has_text]


def _rises(chunks: list[Chunk]) -> Iterator[tuple[int, int]]:
    before = 0
    for chunk in chunks:
        so_far = chunk.completion_tokens or 0
        if so_far > before:
            yield chunk.end, so_far - before
            before = so_far


def _completion_tokens(
    stream: Stream, rule: str | None, carried: list[tuple[int, int]]
) -> tuple[int | None, str | None]:
    if stream.usage_tokens is not None:
        return stream.usage_tokens, "usage"
    if rule is None:
        return None, None
    return sum(count for _, count in carried), "token_ids" if rule == "token_ids" else "text_chunks"


def _state(exchange: Exchange, stream: Stream, body: bytes, tokens: int | None) -> tuple[str, str]:
    """(state, reason). The first thing that is wrong gives the reason."""
    if exchange.aborted:
        return "aborted", exchange.reason
    reason = _failure(exchange, stream, body, tokens)
    return ("failed", reason) if reason else ("complete", "")


def _failure(exchange: Exchange, stream: Stream, body: bytes, tokens: int | None) -> str:
    request, status = exchange.request, exchange.response.status
    if status not in (0, 200):
        return f"HTTP {status}: {_quote(body)}"
    if stream.error or exchange.reason:
        return stream.error or exchange.reason
    if not stream.done and not stream.chunks:
        return f"not an event stream of completions: {_quote(body)}"
    if not stream.done:
        return "stream ended without [DONE]"
    if stream.finish_reason is None:
        return "stream ended without a finish reason"
    if request.ignore_eos and tokens != request.max_tokens:
        return f"expected {request.max_tokens} tokens, got {tokens}"
    return ""


def _quote(data: bytes) -> str:
    return data[:_QUOTED_BYTES].decode("utf-8", "replace")
