"""Gloo on the CPU: sockets or shared memory, every laptop's baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ep_ray.backends.torch_all_to_all import TorchAllToAll


class GlooBackend(TorchAllToAll):
    """`all_to_all_single` over gloo."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options, "cpu")

    def probe(self, env: Mapping[str, str]) -> list[str]:
        if not dist.is_available() or not dist.is_gloo_available():
            return ["this build of torch has no gloo; install one with torch.distributed"]
        return []
