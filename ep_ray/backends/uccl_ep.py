"""UCCL-EP: DeepEP's low-latency interface over any RDMA network card, with proxies on the CPU.

The wheel `uccl` has the native part, `uccl.ep`, only for Python 3.12 and newer, and linked to
CUDA 12. The Python `Buffer` is upstream's `ep/deep_ep_wrapper`, a package named `deep_ep`, and
must come from the same tag. Opening a buffer sleeps three seconds, and removes the barrier files
of other jobs on the host: never run two at a time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch.distributed import ProcessGroup

from ep_ray.a2a.links import gather_hosts, node_size
from ep_ray.backends import probing
from ep_ray.backends.base import Spec
from ep_ray.backends.layouts import take_options
from ep_ray.backends.low_latency import LowLatency, capabilities

WRITTEN_AGAINST = "uccl 0.1.1 with ep/deep_ep_wrapper of tag v0.1.1"
HIDDEN_SIZES = frozenset({2048, 2560, 4096, 5120, 6144, 7168, 8192})
MOST_TOPK = 9
HOW = "pip install uccl==0.1.1 (Python 3.12 or newer, CUDA 12)"
WRAPPER = "install ep/deep_ep_wrapper of tag v0.1.1 (github.com/uccl-project/uccl)"


class UcclEp(LowLatency):
    """`low_latency_dispatch` and `low_latency_combine` of UCCL's `deep_ep.Buffer`."""

    name = "uccl_ep"

    def __init__(self, options: Mapping[str, Any]) -> None:
        chosen = take_options("uccl_ep", options, {"split": False})
        super().__init__(
            capabilities(
                split=chosen["split"],
                needs_nic=False,
                hidden_sizes=HIDDEN_SIZES,
                most_topk=MOST_TOPK,
            )
        )

    def probe(self, env: Mapping[str, str]) -> list[str]:
        reasons = probing.python((3, 12), "the wheel has uccl.ep from there on")
        reasons += probing.package("uccl", HOW)
        reasons += probing.package("deep_ep", WRAPPER) or _not_deepeps()
        reasons += probing.gpu()
        return reasons or probing.imports("uccl.ep") or probing.imports("deep_ep")

    def _open(self, spec: Spec, group: ProcessGroup, most_tokens: int) -> Any:
        # Both are read as truth: the CUDA index of this rank, and the ranks on this host.
        os.environ["LOCAL_RANK"] = str(self.device.index)
        os.environ["LOCAL_WORLD_SIZE"] = str(min(spec.ep, node_size(gather_hosts(group))))
        buffer = import_module("deep_ep").Buffer
        size = buffer.get_low_latency_rdma_size_hint(
            most_tokens, spec.hidden, spec.ep, spec.experts
        )
        return buffer(
            group,
            0,
            size,
            low_latency_mode=True,
            num_qps_per_rank=spec.local_experts,
            explicitly_destroy=True,
        )


def _not_deepeps() -> list[str]:
    folder = probing.folders("deep_ep")[0]
    if "uccl" in (folder / "__init__.py").read_text(errors="replace"):
        return []
    return [f"`deep_ep` in {folder} is not UCCL's wrapper; {WRAPPER} instead of it"]
