"""Backends by name. An adapter is imported only when its backend is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, cast

from ep_ray.backends.base import Backend

ADAPTERS: dict[str, str] = {
    "gloo": "ep_ray.backends.gloo:make",
    "nccl": "ep_ray.backends.nccl:make",
    "uccl": "ep_ray.backends.uccl:Uccl",
    "flashinfer": "ep_ray.backends.flashinfer:FlashInfer",
    "nccl_ep": "ep_ray.backends.nccl_ep:NcclEp",
    "deepep": "ep_ray.backends.deepep:make",
    "deepep_v2": "ep_ray.backends.deepep_v2:DeepEpV2",
    "uccl_ep": "ep_ray.backends.uccl_ep:UcclEp",
    "nixl_ep": "ep_ray.backends.nixl_ep:NixlEp",
    "pplx_garden": "ep_ray.backends.pplx_garden:PplxGarden",
}


class State(Enum):
    """How far an adapter has been tried on the hardware that it is for."""

    never_run = "never run"
    probed = "probed"
    """Its package was found; what else it needs was missing."""
    ep1 = "runs at EP1"
    """Passes the correctness check there, and a result is kept."""
    works = "works"
    """Passes the correctness check with peers, and a result is kept."""


STATUS: dict[str, tuple[State, str]] = {
    "gloo": (State.works, "EP1 to EP4 in the tests, on the CPU"),
    "nccl": (State.works, "one H200: EP1, and EP2 with both ranks on it; never between GPUs"),
    "uccl": (State.probed, "needs a network card and two nodes"),
    "flashinfer": (State.ep1, "one H200, eager and CUDA graph"),
    "nccl_ep": (State.ep1, "one H200, eager and CUDA graph"),
    "deepep": (State.never_run, "no wheel"),
    "deepep_v2": (State.never_run, "no wheel"),
    "uccl_ep": (State.never_run, "half of it has no wheel"),
    "nixl_ep": (State.ep1, "one H200, eager and CUDA graph"),
    "pplx_garden": (State.never_run, "no wheel; needs a network card and GDRCopy"),
}


@dataclass(frozen=True)
class Status:
    """One line of the table of backends.

    Attributes:
        backend: Name, as in `backend.name`.
        state: How far it has been tried.
        written_against: Library and version whose sources the adapter was written from.
        note: What else to know; may be empty.
    """

    backend: str
    state: State
    written_against: str
    note: str


def status_table() -> list[Status]:
    """All backends in the order of `ADAPTERS`. Imports the adapters, not their libraries."""
    return [
        Status(name, STATUS[name][0], _written_against(path), STATUS[name][1])
        for name, path in ADAPTERS.items()
    ]


def _written_against(path: str) -> str:
    return str(getattr(import_module(path.partition(":")[0]), "WRITTEN_AGAINST", "torch"))


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
    module, _, maker = ADAPTERS[name].partition(":")
    make = getattr(import_module(module), maker)
    return cast(Backend, make(dict(options or {})))
