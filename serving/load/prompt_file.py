"""Reads what prompts are made from: a trace (see `trace_file`), or conversations.

Conversations are in the format of ShareGPT: a JSON array of objects, each with `conversations`, a
list of turns `{"from": "human" or "gpt", "value": TEXT}`; more keys do no harm. Tokens are counted
by the model's tokenizer; where none is at hand, four bytes of UTF-8 count as one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from serving.load.trace_file import TraceEntry, read_trace

_BYTES_PER_TOKEN = 4
_MARKER_TOKENS = 17  # most that a marker of 16 digits and a space can be
_ASKING = ("human", "user")
_SILENT = ("system",)
_Counter = tuple[Callable[[str], int], Callable[[str], int]]  # tokens of a prompt, of a reply
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The first question of a conversation, and how long its reply is.

    Attributes:
        prompt: What was asked.
        prompt_tokens: How many tokens that is, with room for a marker before it; without a
            tokenizer about how many it is alone.
        completion_tokens: How many tokens were replied; without a tokenizer about how many.
    """

    prompt: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class PromptFile:
    """What a file gives to send.

    Attributes:
        path: Where it was read.
        digest: SHA-256 of the file.
        conversations: In the order of the file; empty where it is a trace.
        trace: In the order of the file; empty where it holds conversations.
    """

    path: str
    digest: str
    conversations: tuple[Conversation, ...] = ()
    trace: tuple[TraceEntry, ...] = ()


def read_prompt_file(kind: str, path: str, tokenizer: str | None = None) -> PromptFile:
    """Reads a file of `conversations` or a `trace`.

    Conversations in which nobody is asked and replies are left out.

    Args:
        kind: What it holds.
        path: Where it is.
        tokenizer: The model's `tokenizer.json`, which counts the tokens of conversations.

    Raises:
        ValueError: The file is missing or is not in the format; says in which line.
    """
    if kind not in ("conversations", "trace"):
        raise ValueError(f"prompts {kind!r} come from no file")
    where = f"`load.file={path}`"
    if not Path(path).is_file():
        raise ValueError(f"{where}: no such file; it is read where the sweep is started")
    content = Path(path).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{where}, line {line}: no UTF-8: {error.reason}") from error
    digest = hashlib.sha256(content).hexdigest()
    if kind == "trace":
        return PromptFile(path, digest, trace=read_trace(text, where))
    return PromptFile(path, digest, _conversations(text, where, _counter(tokenizer)))


def _counter(tokenizer: str | None) -> _Counter:
    if tokenizer is None:
        return about_tokens, about_tokens
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(tokenizer)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{tokenizer} cannot be read as a tokenizer: {error}") from error

    def prompt(text: str) -> int:
        return len(found.encode(text).ids) + _MARKER_TOKENS

    def reply(text: str) -> int:
        return len(found.encode(text, add_special_tokens=False).ids)

    return prompt, reply


def about_tokens(text: str) -> int:
    """Tokens of a text, as far as its length tells."""
    return -(-len(text.encode()) // _BYTES_PER_TOKEN)


def _conversations(text: str, where: str, counter: _Counter) -> tuple[Conversation, ...]:
    found = []
    for line, element in _elements(text, where):
        turns = _turns(element, f"{where}, line {line}")
        if conversation := _first_exchange(turns, counter):
            found.append(conversation)
    if not found:
        raise ValueError(f"{where}: no conversation in which a human asks and is replied to")
    return tuple(found)


def _elements(text: str, where: str) -> Iterator[tuple[int, Any]]:
    """Elements of a JSON array, each with the line on which it begins."""
    decoder = json.JSONDecoder()
    at, line, counted = _skip(text, 0), 1, 0
    if text[at : at + 1] != "[":
        raise ValueError(f"{where}, line 1: found no `[`: a JSON array of conversations is asked")
    at = _skip(text, at + 1)
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        try:
            element, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}, line {error.lineno}: no JSON: {error.msg}") from error
        yield line, element
        at = _skip(text, end)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            line += text.count("\n", counted, at)
            raise ValueError(f"{where}, line {line}: no `,` or `]` after a conversation")


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found.end()


def _turns(element: Any, where: str) -> list[tuple[str, str]]:
    turns = element.get("conversations") if isinstance(element, dict) else None
    if not isinstance(turns, list):
        raise ValueError(f'{where}: asked an object with "conversations": [...]')
    for turn in turns:
        ok = isinstance(turn, dict) and all(isinstance(turn.get(k), str) for k in ("from", "value"))
        if not ok:
            raise ValueError(f'{where}: asked turns {{"from": WHO, "value": TEXT}}')
    return [(turn["from"], turn["value"].strip()) for turn in turns]


def _first_exchange(turns: list[tuple[str, str]], counter: _Counter) -> Conversation | None:
    spoken = [turn for turn in turns if turn[0] not in _SILENT]
    for (who, prompt), (other, reply) in pairwise(spoken):
        if who in _ASKING:
            if other in _ASKING or not prompt or not reply:
                return None
            return Conversation(prompt, counter[0](prompt), counter[1](reply))
    return None
