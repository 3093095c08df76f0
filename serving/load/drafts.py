"""Draws prompts: random token ids or words, each with a part that no other prompt has.

A draw follows from its key alone. The key of a trial is in every key of its prompts, so that
another trial, or another repeat with the same seed, has other prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from serving.load.seeded import digest, generator

Ids = npt.NDArray[np.int64]

# Common English words, about one token each in most vocabularies.
_TEXT = """
time year people way day man thing woman life child world school state
family student group country problem hand part place case week company system program
question work government number night point home water room mother area money story
"""
_WORDS = tuple(_TEXT.split())


def default_exclusion(vocab_size: int) -> list[range]:
    """Ids that commonly are special: the lowest 1 % (at most 256) and the highest 1/32.

    That covers control and byte tokens at the bottom, and added tokens and unused rows at the
    top, of the Llama, Qwen and DeepSeek vocabularies.
    """
    return [range(min(256, vocab_size // 100)), range(vocab_size - vocab_size // 32, vocab_size)]


def usable_ids(vocab_size: int, excluded: Sequence[range] | None) -> Ids:
    """Ids that may be drawn, rising; `excluded` None takes `default_exclusion`."""
    if excluded is None:
        excluded = default_exclusion(vocab_size)
    banned = np.concatenate([np.arange(0), *(np.array(ids, dtype=np.int64) for ids in excluded)])
    return np.setdiff1d(np.arange(vocab_size), banned)


def token_prompts(
    ids: Ids, trial_key: str, keys: Sequence[str], tokens: int, prefix_tokens: int = 0
) -> list[list[int]]:
    """Random ids; after the prefix that all share, no two prompts go on with the same id.

    Args:
        ids: What may be drawn.
        trial_key: Names the trial.
        keys: Name each prompt.
        tokens: Length of each prompt.
        prefix_tokens: Tokens at the beginning that are the same in all of them.

    Raises:
        ValueError: Fewer ids than prompts.
    """
    if len(keys) > len(ids):
        raise ValueError(
            f"{len(keys)} requests need as many first tokens, the vocabulary has {len(ids)} "
            "usable ids: send fewer requests per cell or exclude fewer ids"
        )
    prefix = generator(f"{trial_key}/prefix").choice(ids, prefix_tokens).tolist()
    firsts = generator(trial_key).permutation(ids)[: len(keys)]
    prompts = []
    for first, key in zip(firsts, keys, strict=True):
        own = generator(key).choice(ids, tokens - prefix_tokens)
        own[0] = first
        prompts.append(prefix + own.tolist())
    return prompts


def text_prompts(
    trial_key: str, keys: Sequence[str], words: int, prefix_words: int = 0
) -> list[str]:
    """A marker that no other prompt has and random common words, after the prefix that all share.

    The prefix begins with a marker of the trial. The arguments are those of `token_prompts`.
    """
    prefix = _words(f"{trial_key}/prefix", prefix_words)
    return [" ".join(prefix + _words(key, words - prefix_words)) for key in keys]


def marker(key: str) -> str:
    """16 hexadecimal digits that stand for a key."""
    return digest(key).hex()[:16]


def _words(key: str, count: int) -> list[str]:
    """The key's marker, then random common words; `count` in all."""
    return [marker(key), *generator(key).choice(_WORDS, count - 1)] if count else []
