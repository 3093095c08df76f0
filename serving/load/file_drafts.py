"""Chooses what a prompt file gives to the requests of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.load.drafts import marker
from serving.load.prompt_file import Conversation, PromptFile
from serving.load.seeded import generator


@dataclass(frozen=True, slots=True)
class Draft:
    """What one request says and how long an answer it asks for.

    Attributes:
        prompt: Text or token ids.
        completion_tokens: Length of the completion.
    """

    prompt: str | list[int]
    completion_tokens: int


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
