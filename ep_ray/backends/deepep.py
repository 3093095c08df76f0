"""DeepEP's `Buffer` (V1): `normal` for throughput, `low_latency` for decoding.

Source: deepseek-ai/DeepEP, `deep_ep/buffer.py` at v1.2.1; `deep_ep/buffers/legacy.py` of 2.1.0
has the same calls. There is no wheel: it is built from source, with NVSHMEM for `low_latency`
and for more than one node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.distributed import ProcessGroup

from ep_ray.backends import probing
from ep_ray.backends.base import Backend, Spec
from ep_ray.backends.deepep_normal import Normal
from ep_ray.backends.layouts import take_options
from ep_ray.backends.low_latency import LowLatency, capabilities

WRITTEN_AGAINST = "DeepEP 1.2.1 (Buffer; also the legacy Buffer of 2.1.0)"
HIDDEN_SIZES = frozenset({2048, 2560, 4096, 5120, 6144, 7168, 8192})
MOST_TOPK = 11
MODES = ("normal", "low_latency")
HOW = "build DeepEP 1.2.1 from source (github.com/deepseek-ai/DeepEP); it has no wheel"


def make(options: Mapping[str, Any]) -> Backend:
    """The adapter of `options.mode`; `options.split` separates send and receive (low_latency)."""
    chosen = take_options("deepep", options, {"mode": "low_latency", "split": False})
    if chosen["mode"] not in MODES:
        raise ValueError(
            f"`backend.options.mode` of deepep is {chosen['mode']!r}; it is one of {MODES}"
        )
    if chosen["mode"] == "low_latency":
        return DeepEpLowLatency(split=chosen["split"])
    if chosen["split"]:
        raise ValueError("`backend.options.split` of deepep needs `mode: low_latency`")
    return DeepEpNormal()


def probe_deepep() -> list[str]:
    """Reasons common to both modes."""
    reasons = probing.package("deep_ep", HOW) or _not_uccls()
    reasons += probing.gpu()
    return reasons or probing.imports("deep_ep")


def _not_uccls() -> list[str]:
    """UCCL-EP installs a package of the same name, which needs `uccl`'s own adapter."""
    folder = probing.folders("deep_ep")[0]
    if find_spec("deep_ep_cpp") is not None or any(folder.glob("_C*.so")):
        return []
    return [f"{folder} has no compiled part, as UCCL-EP's wrapper of that name: use uccl_ep"]


class DeepEpNormal(Normal):
    """`dispatch` and `combine` of `deep_ep.Buffer`."""

    name = "deepep (normal)"

    def probe(self, env: Mapping[str, str]) -> list[str]:
        return probe_deepep()

    def _open(self, spec: Spec, group: ProcessGroup) -> Any:
        library = import_module("deep_ep")
        self.index_dtype = getattr(library, "topk_idx_t", self.index_dtype)
        buffer = library.Buffer
        sizes = self.buffer_sizes(buffer, spec)
        return buffer(group, *sizes, explicitly_destroy=True)


class DeepEpLowLatency(LowLatency):
    """`low_latency_dispatch` and `low_latency_combine` of `deep_ep.Buffer`."""

    name = "deepep (low_latency)"

    def __init__(self, split: bool) -> None:
        # Without a network card NVSHMEM's IBGDA complains and ranks of one node use NVLink.
        super().__init__(
            capabilities(
                split=split, needs_nic=False, hidden_sizes=HIDDEN_SIZES, most_topk=MOST_TOPK
            )
        )

    def probe(self, env: Mapping[str, str]) -> list[str]:
        return probe_deepep()

    def _open(self, spec: Spec, group: ProcessGroup, most_tokens: int) -> Any:
        library = import_module("deep_ep")
        self.index_dtype = getattr(library, "topk_idx_t", self.index_dtype)
        # The library asserts that the queue is deeper than this and reads it from here.
        depth = max(1024, 1 << (2 * (most_tokens + 1) - 1).bit_length())
        os.environ["NVSHMEM_QP_DEPTH"] = str(depth)
        size = library.Buffer.get_low_latency_rdma_size_hint(
            most_tokens, spec.hidden, spec.ep, spec.experts
        )
        return library.Buffer(
            group,
            0,
            size,
            low_latency_mode=True,
            num_qps_per_rank=spec.local_experts,
            explicitly_destroy=True,
        )
