"""Picks one of a library's variants by `backend.options.variant`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

B = TypeVar("B")


def choose(
    variants: Mapping[str, Callable[[Mapping[str, Any]], B]], options: Mapping[str, Any]
) -> B:
    """Makes the variant that is asked for, the first one by default, with the other options.

    Raises:
        ValueError: No such variant.
    """
    rest = dict(options)
    name = rest.pop("variant", next(iter(variants)))
    if name not in variants:
        near = difflib.get_close_matches(str(name), variants, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"`backend.options.variant={name}` is unknown; it is one of {', '.join(variants)}."
            f"{hint}"
        )
    return variants[name](rest)
