"""Reads traces in the format of Mooncake: JSON lines with lengths and blocks, but no words.

Each line has `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`.
Each hash id stands for the next 512 tokens of the prompt, the last for what is left; requests with
the same ids in front have the same tokens there. Source: github.com/kvcache-ai/Mooncake, whose
traces are published with the paper (arXiv 2407.00079).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS = 512
_LENGTHS = ("input_length", "output_length")


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace.

    Attributes:
        line: Where it stands in the file, from 1.
        at_ms: When it arrived.
        prompt_tokens: Length of its prompt.
        completion_tokens: Length of its completion.
        blocks: What its prompt consists of, one for each `BLOCK_TOKENS` begun.
    """

    line: int
    at_ms: float
    prompt_tokens: int
    completion_tokens: int
    blocks: tuple[int, ...]


def read_trace(text: str, where: str) -> tuple[TraceEntry, ...]:
    """Entries of a trace; empty lines are none.

    Args:
        text: Of the file.
        where: What errors call it.

    Raises:
        ValueError: A line is not in the format, times fall, or there is no entry.
    """
    entries: list[TraceEntry] = []
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        entry = _entry(content, line, f"{where}, line {line}")
        if entries and entry.at_ms < entries[-1].at_ms:
            raise ValueError(
                f"{where}, line {line}: timestamp {entry.at_ms:g} after {entries[-1].at_ms:g}: "
                "asked times that do not fall; sort the file"
            )
        entries.append(entry)
    if not entries:
        raise ValueError(f"{where}: no entry")
    return tuple(entries)


def _entry(content: str, line: int, where: str) -> TraceEntry:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from error
    keys = ("timestamp", *_LENGTHS, "hash_ids")
    if not isinstance(found, dict) or not set(keys) <= set(found):
        raise ValueError(f"{where}: asked an object with {', '.join(keys)}")
    at_ms, blocks = found["timestamp"], found["hash_ids"]
    if type(at_ms) not in (int, float) or not (math.isfinite(at_ms) and at_ms >= 0):
        raise ValueError(f"{where}: timestamp {at_ms}: asked milliseconds, not below 0")
    prompt, completion = (_length(found, key, where) for key in _LENGTHS)
    needed = math.ceil(prompt / BLOCK_TOKENS)
    if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
        raise ValueError(f"{where}: hash_ids: asked a list of integers")
    if len(blocks) != needed:
        raise ValueError(
            f"{where}: {len(blocks)} hash_ids for input_length {prompt}: asked {needed}, one "
            f"for each {BLOCK_TOKENS} tokens begun"
        )
    return TraceEntry(line, at_ms, prompt, completion, tuple(blocks))


def _length(found: dict[str, Any], key: str, where: str) -> int:
    value = found[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: {key} {value}: asked an integer, at least 1")
    return value
