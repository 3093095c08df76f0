"""NIXL EP: DeepEP's low-latency interface on NIXL's device API (UCX: NVLink and RDMA).

On a time-out the library masks the silent rank and goes on, as if it had no tokens: the mask is
read after every operation, and a masked rank is an error. Each wheel holds binaries for a few
torch versions: nixl-cu13 1.4.1 for torch 2.11 to 2.14, 1.5.1 for 2.12 to 2.14.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from ep_ray.backends import probing
from ep_ray.backends.base import Spec
from ep_ray.backends.layouts import take_options
from ep_ray.backends.low_latency import LowLatency, capabilities

WRITTEN_AGAINST = "nixl-cu13 1.4.1 and 1.5.1 (module nixl_ep_cu13)"
MODULE = "nixl_ep_cu13"
HIDDEN_SIZES = frozenset({2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192})
MOST_TOPK = 16
HOW = "pip install nixl-cu13==1.5.1 (1.4.1 for torch 2.11)"
TIMEOUT_MS = 10_000
"""After which a silent rank is masked; far beyond any operation that works."""


class NixlEp(LowLatency):
    """`low_latency_dispatch` and `low_latency_combine` of `nixl_ep.Buffer`."""

    name = "nixl_ep"

    def __init__(self, options: Mapping[str, Any]) -> None:
        chosen = take_options("nixl_ep", options, {"split": False})
        super().__init__(
            capabilities(
                split=chosen["split"],
                needs_nic=False,
                hidden_sizes=HIDDEN_SIZES,
                most_topk=MOST_TOPK,
            )
        )

    def probe(self, env: Mapping[str, str]) -> list[str]:
        reasons = probing.package(MODULE, HOW) or _for_this_torch()
        reasons += probing.gpu()
        return reasons or probing.imports(MODULE)

    def _open(self, spec: Spec, group: ProcessGroup, most_tokens: int) -> Any:
        library = import_module(MODULE)
        self.index_dtype = getattr(library, "topk_idx_t", self.index_dtype)
        size = library.Buffer.get_rdma_size_hint(most_tokens, spec.hidden, spec.ep, spec.experts)
        self._store = _exchange_store(group)
        buffer = library.Buffer(
            explicitly_destroy=True,
            rank=self.rank,
            low_latency_mode=True,
            tcp_store_group=self._store,
            timeout_ms=TIMEOUT_MS,
        )
        buffer.update_memory_buffers(spec.ep, spec.local_experts, size)
        buffer.connect_ranks(list(range(spec.ep)))
        self._mask = torch.zeros(spec.ep, dtype=torch.int32, device=self.device)
        return buffer

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        self._refuse_masked_ranks()
        super().plan(topk_idx, weights)

    def _refuse_masked_ranks(self) -> None:
        self._buffer.query_mask_buffer(self._mask)
        masked = self._mask.nonzero().flatten().tolist()
        if masked:
            raise RuntimeError(
                f"nixl_ep masked ranks {masked} after {TIMEOUT_MS} ms without an answer: what it"
                " measured since is not an all-to-all over all ranks"
            )

    def destroy(self) -> None:
        self._refuse_masked_ranks()
        super().destroy()
        del self._store


def _for_this_torch() -> list[str]:
    folder = probing.folders(MODULE)[0]
    wanted = "torch" + "".join(torch.__version__.split(".")[:2])
    have = sorted(path.name.split(".")[0].rpartition("_")[2] for path in folder.glob("*_torch*.so"))
    if wanted in have:
        return []
    return [f"{MODULE} has binaries for {', '.join(have) or 'no torch'}, this is {wanted}; {HOW}"]


def _exchange_store(group: ProcessGroup) -> PrefixStore:
    """A part of the group's store of its own: the library's keys name ranks only."""
    leader = dist.get_process_group_ranks(group)[0]
    name = [f"nixl_ep/{uuid4()}"]
    dist.broadcast_object_list(name, src=leader, group=group)
    return PrefixStore(name[0], _get_default_store())
