"""Gloo on the CPU: sockets or shared memory, every laptop's baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ep_ray.backends import torch_equal, torch_exact, torch_padded
from ep_ray.backends.torch_rows import RowAllToAll
from ep_ray.backends.variants import choose


class _OverGloo:
    def probe(self, env: Mapping[str, str]) -> list[str]:
        if not dist.is_available() or not dist.is_gloo_available():
            return ["this build of torch has no gloo; install one with torch.distributed"]
        return []


class GlooBackend(_OverGloo, torch_exact.ExactAllToAll):
    """`all_to_all_single` with exact split lists over gloo."""

    capabilities = torch_exact.capabilities("cpu")


class GlooEqual(_OverGloo, torch_equal.EqualAllToAll):
    """`all_to_all_single` with equal splits over gloo."""

    capabilities = torch_equal.capabilities("cpu")


class GlooPadded(_OverGloo, torch_padded.PaddedAllToAll):
    """`all_to_all_single` of padded (token, expert) slots over gloo."""

    capabilities = torch_padded.capabilities("cpu")


def make(options: Mapping[str, Any]) -> RowAllToAll:
    """The variant that `options` names."""
    variants = {"exact": GlooBackend, "equal": GlooEqual, "padded": GlooPadded}
    return choose(variants, options)
