"""Chooses what a prompt file gives to the requests of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.load.drafts import Ids, marker
from serving.load.prompt_file import Conversation, PromptFile
from serving.load.seeded import generator
from serving.load.trace_file import BLOCK_TOKENS, TraceEntry


@dataclass(frozen=True, slots=True)
class Draft:
    """What one request says and how long an answer it asks for.

    Attributes:
        prompt: Text or token ids.
        completion_tokens: Length of the completion.
        at_ms: When it arrived in the trace that it is from; None without one.
    """

    prompt: str | list[int]
    completion_tokens: int
    at_ms: float | None = None


def fitting(
    file: PromptFile, completion_tokens: int | None, most_tokens: int | None
) -> list[Conversation]:
    """Conversations that a model can hold.

    Args:
        file: Where they are from.
        completion_tokens: Length that is asked of all completions; None takes the replies'.
        most_tokens: Longest prompt + completion of the model; None where it is not known.

    Raises:
        ValueError: None fits.
    """
    if most_tokens is None:
        return list(file.conversations)
    found = [
        one
        for one in file.conversations
        if one.prompt_tokens + (completion_tokens or one.completion_tokens) <= most_tokens
    ]
    if not found:
        raise ValueError(
            f"`load.file={file.path}`: none of its {len(file.conversations)} conversations fits "
            f"into model.max_model_len={most_tokens}, the completion included"
        )
    return found


def conversation_drafts(
    choices: Sequence[Conversation],
    draw: str,
    roles: Sequence[str],
    keys: Sequence[str],
    completion_tokens: int | None,
) -> list[Draft]:
    """Conversations in an order of the draw's own, each behind a marker of its request.

    The marker is what keeps a prefix cache from answering what it saw in another trial. Measured
    requests come first in the order, whatever is sent before them, and it begins anew where there
    are more requests than conversations.

    Args:
        choices: What may be sent.
        draw: Names the order.
        roles: Of each request.
        keys: Name each request.
        completion_tokens: Asked of all; None asks for the length of each reply.
    """
    order = generator(draw).permutation(len(choices))
    measured = roles.count("measured")
    places = {"measured": 0, "others": measured}
    drafts = []
    for role, key in zip(roles, keys, strict=True):
        group = "measured" if role == "measured" else "others"
        chosen = choices[order[places[group] % len(choices)]]
        places[group] += 1
        length = completion_tokens or chosen.completion_tokens
        drafts.append(Draft(f"{marker(key)} {chosen.prompt}", length))
    return drafts


def trace_part(
    file: PromptFile, requests: int, completion_tokens: int | None, most_tokens: int | None
) -> tuple[TraceEntry, ...]:
    """The first entries of a trace: as many as there are requests.

    Args:
        file: Where they are from.
        requests: Measured requests of the cell.
        completion_tokens: Length that is asked of all completions; None takes the trace's.
        most_tokens: Longest prompt + completion of the model; None where it is not known.

    Raises:
        ValueError: There are fewer entries, or the model cannot hold one.
    """
    part = file.trace[:requests]
    if len(part) < requests:
        raise ValueError(
            f"`load.file={file.path}`: {len(part)} entries for a cell of {requests} requests; "
            "lower load.rate, load.duration_s, load.concurrency or load.min_requests"
        )
    for entry in part:
        tokens = entry.prompt_tokens + (completion_tokens or entry.completion_tokens)
        if most_tokens is not None and tokens > most_tokens:
            raise ValueError(
                f"`load.file={file.path}`, line {entry.line}: {tokens} tokens with the completion "
                f"are more than model.max_model_len={most_tokens}"
            )
    return part


def trace_drafts(
    part: Sequence[TraceEntry],
    ids: Ids,
    trial_key: str,
    roles: Sequence[str],
    keys: Sequence[str],
    completion_tokens: int | None,
) -> list[Draft]:
    """Prompts of exact length that share tokens where the trace's requests share blocks.

    Blocks are drawn anew in each trial. What is not measured takes the lengths of the first
    entries and shares nothing, so that it puts no block into a cache.

    Args:
        part: An entry for each measured request.
        ids: What may be drawn.
        trial_key: Names the trial.
        roles: Of each request.
        keys: Name each request.
        completion_tokens: Asked of all; None asks for the trace's own.
    """
    blocks: dict[str, list[int]] = {}

    def tokens(owner: str, entry: TraceEntry) -> list[int]:
        prompt: list[int] = []
        for block in entry.blocks:
            name = f"{owner}/block/{block}"
            if name not in blocks:
                blocks[name] = generator(name).choice(ids, BLOCK_TOKENS).tolist()
            prompt += blocks[name]
        return prompt[: entry.prompt_tokens]

    drafts = []
    places = {True: 0, False: 0}
    for role, key in zip(roles, keys, strict=True):
        measured = role == "measured"
        entry = part[places[measured] % len(part)]
        places[measured] += 1
        prompt = tokens(trial_key if measured else key, entry)
        at_ms = entry.at_ms if measured else None
        drafts.append(Draft(prompt, completion_tokens or entry.completion_tokens, at_ms))
    return drafts
