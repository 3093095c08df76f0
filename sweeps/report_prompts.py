"""What the prompts of a sweep were made of, where they were not the usual random token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sweeps.results import Trial

_WORDS = {
    "text": "random words with a marker of their own",
    "shared_prefix": "the first {shared_prefix_tokens} tokens are the same in all of a cell",
    "conversations": "first questions of {file}, each behind a marker of its own",
    "trace": "lengths and shared blocks of {file}",
}


def prompts_remark(found: Sequence[Trial]) -> list[str]:
    """A paragraph that names each kind of prompts; none where all were token ids."""
    kinds = dict.fromkeys(words for trial in found if (words := _kind(trial)))
    return [f"Prompts: {'; '.join(kinds)}."] if kinds else []


def _kind(trial: Trial) -> str:
    if trial.prompts not in _WORDS:
        return ""
    config = json.loads(trial.config_json or "{}")
    load = (config.get("arm") or {}).get("load") or {}
    known = f", SHA-256 {trial.prompts_digest}" if trial.prompts_digest else ""
    return f"{trial.prompts} ({_WORDS[trial.prompts].format(**load)}{known})"
