"""Backends by name. An adapter is imported only when its backend is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from ep_ray.backends.base import Backend

ADAPTERS: dict[str, str] = {
    "gloo": "ep_ray.backends.gloo:make",
    "nccl": "ep_ray.backends.nccl:make",
}


def load(name: str, options: Mapping[str, Any] | None = None) -> Backend:
    """Returns a fresh backend.

    Args:
        name: A key of `ADAPTERS`.
        options: Settings that only this library knows.

    Raises:
        ValueError: Unknown name, or an option that the adapter does not know.
    """
    if name not in ADAPTERS:
        near = difflib.get_close_matches(name, ADAPTERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"backend {name!r} is unknown; `backend.name` is one of {', '.join(ADAPTERS)}.{hint}"
        )
    module, _, cls = ADAPTERS[name].partition(":")
    adapter = getattr(import_module(module), cls)
    return cast(Backend, adapter(dict(options or {})))
