"""NCCL on CUDA: the baseline that every expert-parallel library wants to beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ep_ray.backends import torch_equal, torch_exact, torch_padded
from ep_ray.backends.torch_rows import RowAllToAll
from ep_ray.backends.variants import choose


class _OverNccl:
    def probe(self, env: Mapping[str, str]) -> list[str]:
        reasons = []
        if not dist.is_available() or not dist.is_nccl_available():
            reasons.append("this build of torch has no NCCL; install a CUDA build")
        if not torch.cuda.is_available():
            reasons.append("torch sees no CUDA GPU; check the driver and CUDA_VISIBLE_DEVICES")
        return reasons


class NcclBackend(_OverNccl, torch_exact.ExactAllToAll):
    """`all_to_all_single` with exact split lists over NCCL."""

    capabilities = torch_exact.capabilities("cuda")


class NcclEqual(_OverNccl, torch_equal.EqualAllToAll):
    """`all_to_all_single` with equal splits over NCCL."""

    capabilities = torch_equal.capabilities("cuda")


class NcclPadded(_OverNccl, torch_padded.PaddedAllToAll):
    """`all_to_all_single` of padded (token, expert) slots over NCCL."""

    capabilities = torch_padded.capabilities("cuda")


def make(options: Mapping[str, Any]) -> RowAllToAll:
    """The variant that `options` names."""
    variants = {"exact": NcclBackend, "equal": NcclEqual, "padded": NcclPadded}
    return choose(variants, options)
