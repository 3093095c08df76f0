"""Errors that end a command with one line instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(Exception):
    """A configuration that cannot run: says what was asked, what was found, how to mend it."""


class SweepError(Exception):
    """A sweep that cannot go on: says what happened, and that it can be resumed where it can."""


def nearest(wrong: str, allowed: Iterable[str]) -> str | None:
    """The allowed word closest to `wrong`, or None if nothing is close."""
    matches = get_close_matches(wrong, list(allowed), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(wrong: str, allowed: Iterable[str], prefix: str = "") -> str:
    """A line that suggests the nearest allowed word and lists them all."""
    words = sorted(allowed)
    near = nearest(wrong, words)
    hint = f"did you mean `{prefix}{near}`? " if near else ""
    return f"{hint}allowed: {', '.join(words) or 'nothing'}"
