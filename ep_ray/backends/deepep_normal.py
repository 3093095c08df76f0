"""The throughput interface of DeepEP's `Buffer`: layout, dispatch with a host sync, combine.

Rows arrive packed, one per (token, rank); between nodes a row crosses once per node and is
handed on over NVLink. Combine adds rows without weights, so the experts apply them.

Bytes: a row inside a node has its payload, K int64 experts, K float32 weights and an int32
index. Between nodes it is a message of payload, 8 bytes of origin, K int32 and K float32, padded
to 16 bytes, on both hops. Queue heads and tails, 4 bytes at a time, are not counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ep_ray.a2a.bounds import crossing
from ep_ray.a2a.links import gather_hosts, node_size
from ep_ray.a2a.quantise import dequantise
from ep_ray.backends.base import Capabilities, Received, Spec, Tokens, WireBytes
from ep_ray.backends.layouts import (
    BF16_ONLY,
    BOTH_DTYPES,
    CUDA,
    align,
    expert_sums,
    fill_nan,
    refuse,
    to_global,
)

EP_SIZES = frozenset({2, 4, 8, 16, 24, 32, 64, 128, 144, 160})
"""Sizes for which the library has a tuned configuration; others are an assertion there."""
ORIGIN_BYTES = 8
INDEX_BYTES = 4

CAPABILITIES = Capabilities(
    layout="packed rows by source rank, one per (token, rank)",
    dispatch_dtypes=BOTH_DTYPES,
    combine_dtypes=BF16_ONLY,
    devices=CUDA,
    ep_sizes=EP_SIZES,
    split=False,
    graph=False,
    dedup="node",
    quantises_inside=False,
    weights_applied="on the expert rank with the expert, outside the clock",
    sums_per_rank=True,
    host_sync=True,
    needs_nic=False,
    dispatch_region=(
        "layout from top-k, counts exchange, host sync for the received counts,"
        " allocation of the outputs by torch, row exchange"
    ),
    combine_region="row exchange, float32 sum over ranks, rounding to BF16",
    hidden_sizes=None,
)


class Normal(ABC):
    """Common part of the adapters; each opens its own buffer."""

    name: str
    index_dtype = torch.int64

    def __init__(self) -> None:
        self.capabilities = CAPABILITIES

    @abstractmethod
    def probe(self, env: Mapping[str, str]) -> list[str]:
        """See `Backend.probe`."""

    @abstractmethod
    def _open(self, spec: Spec, group: ProcessGroup) -> Any:
        """The library's buffer; collective."""

    @staticmethod
    def buffer_sizes(buffer: Any, spec: Spec) -> tuple[int, int]:
        """Bytes for NVLink and for RDMA that the library recommends."""
        configs = (buffer.get_dispatch_config(spec.ep), buffer.get_combine_config(spec.ep))
        widest = 2 * spec.hidden
        nvlink = max(config.get_nvl_buffer_size_hint(widest, spec.ep) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(widest, spec.ep) for config in configs)
        return nvlink, rdma

    def setup(self, spec: Spec, group: ProcessGroup, device: torch.device) -> None:
        refuse(self.name, self.capabilities, spec)
        self.spec, self.device, self.rank = spec, device, dist.get_rank(group)
        self.node = node_size(gather_hosts(group))
        self._buffer = self._open(spec, group)
        most = spec.ep * spec.tokens
        self._expert_out = torch.zeros(most, spec.hidden, dtype=torch.bfloat16, device=device)
        choices = (spec.tokens, spec.topk)
        self._topk = torch.zeros(choices, dtype=self.index_dtype, device=device)
        self._weights = torch.zeros(choices, device=device)
        self._got: tuple[torch.Tensor, ...] = ()
        self._out: torch.Tensor | None = None

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        self._topk.copy_(topk_idx)
        self._weights.copy_(weights)

    def dispatch_send(self, tokens: Tokens) -> None:
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
            self._topk, self.spec.experts
        )
        rows, self._got_topk, self._got_weights, self._per_expert, self._handle, _ = (
            self._buffer.dispatch(
                tokens.rows if tokens.scales is None else (tokens.rows, tokens.scales),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_rdma_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=self._topk,
                topk_weights=self._weights,
            )
        )
        self._got = rows if isinstance(rows, tuple) else (rows,)

    def dispatch_recv(self) -> None:  # noqa: B027
        """Nothing: `dispatch_send` has done it."""

    def combine_send(self) -> None:
        outputs = self._expert_out[: len(self._got_topk)]
        self._out, _, _ = self._buffer.combine(outputs, self._handle)

    def combine_recv(self) -> torch.Tensor:
        assert self._out is not None, "combine_send comes first"
        return self._out

    def received(self) -> Received:
        return Received(
            rows=dequantise(Tokens(*self._got)),
            topk_idx=to_global(self._got_topk, self.rank, self.spec),
            weights=self._got_weights,
            expert_counts=torch.tensor(self._per_expert),
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
        spec = self.spec
        dispatch_row, combine_row = row_bytes(spec, one_node=spec.ep <= self.node)
        rows = crossing(topk_idx_all, spec.experts, "node", min(self.node, spec.ep))
        matrix = rows.intra + rows.inter
        counts = INDEX_BYTES * (1 + spec.local_experts)
        dispatch = matrix * dispatch_row + counts
        np.fill_diagonal(dispatch, 0)
        return WireBytes(dispatch, matrix.T * combine_row)

    def destroy(self) -> None:
        self._buffer.destroy()
        del self._buffer, self._expert_out, self._topk, self._weights, self._got, self._out


def row_bytes(spec: Spec, one_node: bool) -> tuple[int, int]:
    """Bytes of a dispatched and of a combined row; see the module's description."""
    if one_node:
        metadata = spec.topk * (8 + 4) + INDEX_BYTES
        return spec.dispatch_row_bytes + metadata, spec.combine_row_bytes + INDEX_BYTES
    metadata = ORIGIN_BYTES + spec.topk * (4 + 4)
    dispatch = align(spec.dispatch_row_bytes + metadata, 16)
    return dispatch, align(spec.combine_row_bytes + ORIGIN_BYTES, 16)
