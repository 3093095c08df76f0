"""DeepEP's `ElasticBuffer` (V2), on NCCL's device API: NVLink in a node, RDMA between nodes.

Without the expanding layout rows arrive packed, one per (token, rank), and combine adds them
without weights, so the experts apply them. With a host sync (`cpu_sync: true`) the outputs have
the received size; without, the worst case, and the step can be captured in a CUDA graph. Without
a network card `EP_DISABLE_GIN=1` is needed. NCCL 2.30.4 must be the one NCCL of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ep_ray.a2a.bounds import crossing
from ep_ray.a2a.links import gather_hosts, node_size
from ep_ray.a2a.quantise import dequantise
from ep_ray.backends import probing
from ep_ray.backends.base import SCALE_BLOCK, Capabilities, Received, Spec, Tokens, WireBytes
from ep_ray.backends.layouts import (
    BF16_ONLY,
    BOTH_DTYPES,
    CUDA,
    align,
    expert_sums,
    fill_nan,
    refuse,
    take_options,
    to_global,
)
from ep_ray.config.schema import Dtype

WRITTEN_AGAINST = "DeepEP 2.1.0 (commit dd758ca)"
HOW = "build DeepEP 2.1.0 from source (github.com/deepseek-ai/DeepEP); it has no wheel"
LEAST_NCCL = (2, 30, 4)
PART_BYTES = 32
"""Payload, scales and metadata of a row are each padded to a multiple of this."""


def capabilities(cpu_sync: bool) -> Capabilities:
    """What `ElasticBuffer` offers; `cpu_sync` waits for the received counts on the host."""
    return Capabilities(
        layout="packed rows, one per (token, rank)",
        dispatch_dtypes=BOTH_DTYPES,
        combine_dtypes=BF16_ONLY,
        devices=CUDA,
        ep_sizes=None,
        split=False,
        graph=not cpu_sync,
        dedup="node",
        quantises_inside=False,
        weights_applied="on the expert rank with the expert, outside the clock",
        sums_per_rank=True,
        host_sync=cpu_sync,
        needs_nic=False,
        dispatch_region=(
            "layout from top-k, counts exchange, row exchange, copy out of the receive buffer,"
            " allocation of the outputs by torch, copy of top-k into the handle"
            + (", host sync for the received counts" if cpu_sync else "")
        ),
        combine_region="row exchange, sum over ranks (and over nodes), allocation of the output",
    )


class DeepEpV2:
    """`dispatch` and `combine` of `deep_ep.ElasticBuffer`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._cpu_sync: bool = take_options("deepep_v2", options, {"cpu_sync": True})["cpu_sync"]
        self.capabilities = capabilities(self._cpu_sync)

    def probe(self, env: Mapping[str, str]) -> list[str]:
        reasons = probing.package("deep_ep", HOW) + probing.compiler(env) + probing.gpu()
        reasons += probing.nccl(LEAST_NCCL)
        if probing.nic() and env.get("EP_DISABLE_GIN") != "1":
            reasons.append("there is no RDMA network card and EP_DISABLE_GIN is not 1; set it")
        return reasons or probing.imports("deep_ep") or _is_v2()

    def setup(self, spec: Spec, group: ProcessGroup, device: torch.device) -> None:
        refuse("deepep_v2", self.capabilities, spec)
        self.spec, self.device, self.rank = spec, device, dist.get_rank(group)
        self.node = node_size(gather_hosts(group))
        library = import_module("deep_ep")
        self._buffer = library.ElasticBuffer(
            group,
            num_max_tokens_per_rank=spec.tokens,
            hidden=spec.hidden,
            num_topk=spec.topk,
            use_fp8_dispatch=spec.dispatch_dtype is Dtype.fp8,
            explicitly_destroy=True,
        )
        most = spec.ep * spec.tokens
        self._expert_out = torch.zeros(most, spec.hidden, dtype=torch.bfloat16, device=device)
        choices = (spec.tokens, spec.topk)
        self._topk = torch.zeros(choices, dtype=library.topk_idx_t, device=device)
        self._weights = torch.zeros(choices, device=device)
        self._got: tuple[torch.Tensor, ...] = ()
        self._out: torch.Tensor | None = None

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        self._topk.copy_(topk_idx)
        self._weights.copy_(weights)

    def dispatch_send(self, tokens: Tokens) -> None:
        rows, self._got_topk, self._got_weights, self._handle, _ = self._buffer.dispatch(
            tokens.rows if tokens.scales is None else (tokens.rows, tokens.scales),
            topk_idx=self._topk,
            topk_weights=self._weights,
            num_experts=self.spec.experts,
            do_cpu_sync=self._cpu_sync,
        )
        self._got = rows if isinstance(rows, tuple) else (rows,)

    def dispatch_recv(self) -> None:
        """Nothing: `dispatch_send` has done it."""

    def combine_send(self) -> None:
        outputs = self._expert_out[: len(self._got[0])]
        self._out, _, _ = self._buffer.combine(outputs, self._handle)

    def combine_recv(self) -> torch.Tensor:
        assert self._out is not None, "combine_send comes first"
        return self._out

    def received(self) -> Received:
        through = self._handle.psum_num_recv_tokens_per_scaleup_rank.long()
        count = int(through[-1])
        counts = torch.diff(through, prepend=through.new_zeros(1))
        return Received(
            rows=dequantise(Tokens(*(part[:count] for part in self._got))),
            topk_idx=to_global(self._got_topk[:count], self.rank, self.spec),
            weights=self._got_weights[:count],
            # With several nodes the counts are per rank of this node, not per source.
            source_counts=counts if len(counts) == self.spec.ep else None,
        )

    def apply_experts(self, factors: torch.Tensor) -> None:
        sums = expert_sums(self.received(), factors)
        self._expert_out[: len(sums)] = sums.bfloat16()

    def poison(self) -> None:
        """The expert outputs, and what was returned last: torch hands out that memory again."""
        returned = self._got if self._out is None else (*self._got, self._out)
        for tensor in (*returned, self._expert_out):
            fill_nan(tensor)
        self._got, self._out = (), None

    def wire_bytes(self, topk_idx_all: NDArray[np.int64]) -> WireBytes:
        """Rows with their metadata; counters of a few bytes per pair are not included."""
        spec = self.spec
        rows = crossing(topk_idx_all, spec.experts, "node", min(self.node, spec.ep))
        matrix = rows.intra + rows.inter
        dispatch_row, combine_row = row_bytes(spec)
        return WireBytes(matrix * dispatch_row, matrix.T * combine_row)

    def destroy(self) -> None:
        self._buffer.destroy()
        del self._buffer, self._expert_out, self._topk, self._weights, self._got, self._out


def row_bytes(spec: Spec) -> tuple[int, int]:
    """Bytes of a dispatched and of a combined row in the library's token layout.

    Dispatch: payload, scales, and K experts, K weights, one source index and K slots of 4 bytes.
    Combine: payload, and K experts and K weights.
    """
    fp8 = spec.dispatch_dtype is Dtype.fp8
    payload = spec.hidden if fp8 else 2 * spec.hidden
    scales = 4 * (spec.hidden // SCALE_BLOCK) if fp8 else 0
    parts = (payload, scales, 4 * (3 * spec.topk + 1))
    combine = (spec.combine_row_bytes, 8 * spec.topk)
    return sum(align(p, PART_BYTES) for p in parts), sum(align(p, PART_BYTES) for p in combine)


def _is_v2() -> list[str]:
    if hasattr(import_module("deep_ep"), "ElasticBuffer"):
        return []
    return [f"the `deep_ep` installed here has no ElasticBuffer; {HOW}"]
