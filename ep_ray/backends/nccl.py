"""NCCL on CUDA: the baseline that every expert-parallel library wants to beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ep_ray.backends.torch_all_to_all import TorchAllToAll


class NcclBackend(TorchAllToAll):
    """`all_to_all_single` over NCCL."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options, "cuda")

    def probe(self, env: Mapping[str, str]) -> list[str]:
        reasons = []
        if not dist.is_available() or not dist.is_nccl_available():
            reasons.append("this build of torch has no NCCL; install a CUDA build")
        if not torch.cuda.is_available():
            reasons.append("torch sees no CUDA GPU; check the driver and CUDA_VISIBLE_DEVICES")
        return reasons
