"""What the null engine answers: the bytes of an OpenAI-compatible stream without a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_DEFAULT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of the null engine.

    Attributes:
        tokens: Tokens to stream, 1 or more.
        prompt_tokens: Of a prompt of token ids its length, of text its words.
        stream: Whether the answer is a stream.
        usage: Whether a last event says the counts of tokens.
        chat: Whether it came to the chat endpoint.
        model: The name that it asked for.
    """

    tokens: int
    prompt_tokens: int
    stream: bool
    usage: bool
    chat: bool
    model: str

    @classmethod
    def read(cls, body: bytes, chat: bool) -> Asked:
        """From the JSON body of a call.

        Raises:
            ValueError: It is no JSON object, or its number of tokens is not 1 or more.
        """
        call = json.loads(body)
        if not isinstance(call, dict):
            raise ValueError("the body is not a JSON object")
        tokens = call.get("max_completion_tokens") or call.get("max_tokens", _DEFAULT_TOKENS)
        if not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"max_tokens is {tokens!r}: an integer, 1 or more")
        options = call.get("stream_options") or {}
        return cls(
            tokens,
            _prompt_tokens(call),
            bool(call.get("stream")),
            bool(options.get("include_usage")),
            chat,
            str(call.get("model", "null")),
        )


def _prompt_tokens(call: dict[str, object]) -> int:
    prompt = call.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt.split())
    messages = call.get("messages")
    said = messages if isinstance(messages, list) else []
    return sum(len(str(turn.get("content", "")).split()) for turn in said)


@lru_cache(maxsize=64)
def sends(asked: Asked, tokens_per_send: int) -> tuple[bytes, ...]:
    """The bytes of a stream, one entry for each write of `tokens_per_send` tokens.

    The first holds the head, the last what ends the stream. Each token is an event in a chunk of
    its own, as engines send them. Streams that ask for the same are the same, ids included, so
    that many requests at once do not keep the engine from reading its sockets.
    """
    kind = "chat.completion.chunk" if asked.chat else "text_completion"
    common = {"id": _identity(asked), "object": kind, "created": 0, "model": asked.model}
    token = _event(common | {"choices": [_choice(asked.chat, None)]})
    last = _event(common | {"choices": [_choice(asked.chat, "length")]})
    tail = b""
    if asked.usage:
        tail = _event(common | {"choices": [], "usage": usage(asked)})
    tail += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    counts = [tokens_per_send] * (asked.tokens // tokens_per_send)
    if left := asked.tokens % tokens_per_send:
        counts.append(left)
    parts = [token * count for count in counts]
    parts[-1] = token * (counts[-1] - 1) + last + tail
    parts[0] = HEAD + parts[0]
    return tuple(parts)


def whole(asked: Asked) -> bytes:
    """The bytes of an answer in one piece, for a call without `stream`."""
    text = " w" * asked.tokens
    said = {"message": {"role": "assistant", "content": text}} if asked.chat else {"text": text}
    answer = {
        "id": _identity(asked),
        "object": "chat.completion" if asked.chat else "text_completion",
        "created": 0,
        "model": asked.model,
        "choices": [{"index": 0, "finish_reason": "length", **said}],
        "usage": usage(asked),
    }
    return plain(200, json.dumps(answer).encode(), "application/json")


def usage(asked: Asked) -> dict[str, int]:
    """The counts of tokens as OpenAI's `usage` has them."""
    return {
        "prompt_tokens": asked.prompt_tokens,
        "completion_tokens": asked.tokens,
        "total_tokens": asked.prompt_tokens + asked.tokens,
    }


def plain(status: int, body: bytes, content_type: str = "text/plain") -> bytes:
    """The bytes of a response with a length."""
    words = {200: "OK", 400: "Bad Request", 404: "Not Found"}[status]
    head = f"HTTP/1.1 {status} {words}\r\ncontent-type: {content_type}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _identity(asked: Asked) -> str:
    return "chatcmpl-null" if asked.chat else "cmpl-null"


def _choice(chat: bool, finish: str | None) -> dict[str, object]:
    said: dict[str, object] = {"delta": {"content": " w"}} if chat else {"text": " w"}
    return {"index": 0, "finish_reason": finish, **said}


def _event(content: dict[str, object]) -> bytes:
    return _chunk(b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
