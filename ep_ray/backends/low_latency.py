"""The low-latency interface that DeepEP made and that UCCL-EP and NIXL EP took over.

Dispatch takes BF16 rows and casts them in the kernel. Scales are rounded up to powers of two
(`round_scale`): then the correctness check can compare bit for bit, and the cast costs the same.
Received rows lie in `[L, R x M, H]`, one per (token, expert), filled from the front; M is the
most tokens that a rank sends. Combine applies the router's weights at the source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

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
    wire,
)
from ep_ray.config.schema import Dtype

HEADER_BYTES = 16
"""Each dispatched row travels behind a 16-byte header with its index at the source."""
COUNT_BYTES = 4
"""Per (source, expert): an int32 count in dispatch, an int32 flag in combine."""


def capabilities(
    *, split: bool, needs_nic: bool, hidden_sizes: frozenset[int], most_topk: int
) -> Capabilities:
    """What the low-latency kernels offer, where the libraries agree."""
    return Capabilities(
        layout="[L, R x M, H] padded per local expert, one row per (token, expert)",
        dispatch_dtypes=BOTH_DTYPES,
        combine_dtypes=BF16_ONLY,
        devices=CUDA,
        ep_sizes=None,
        split=split,
        graph=True,
        dedup="none",
        quantises_inside=True,
        weights_applied="in combine at the source rank, inside the clock",
        sums_per_rank=False,
        host_sync=False,
        needs_nic=needs_nic,
        dispatch_region=(
            "cast of BF16 rows to the wire type with power-of-two scales, send, receive,"
            " copy into the expert-major layout, allocation of the outputs by torch"
        ),
        combine_region="copy of expert outputs into the send buffer, send, weighted float32 sum",
        hidden_sizes=hidden_sizes,
        topk_sizes=frozenset(range(1, most_topk + 1)),
    )


class LowLatency(ABC):
    """Common part of the adapters; each opens its own buffer."""

    name: str
    index_dtype = torch.int64

    def __init__(self, can: Capabilities) -> None:
        self.capabilities = can

    @abstractmethod
    def probe(self, env: Mapping[str, str]) -> list[str]:
        """See `Backend.probe`."""

    @abstractmethod
    def _open(self, spec: Spec, group: ProcessGroup, most_tokens: int) -> Any:
        """The library's buffer for `most_tokens` per rank; collective."""

    def setup(self, spec: Spec, group: ProcessGroup, device: torch.device) -> None:
        refuse(self.name, self.capabilities, spec)
        self.spec, self.group, self.device = spec, group, device
        self.rank = dist.get_rank(group)
        # R x M must be a multiple of 4 for the kernels' bulk copies.
        self.most_tokens = align(spec.tokens, 4)
        self._buffer = self._open(spec, group, self.most_tokens)
        slots = (spec.local_experts, spec.ep * self.most_tokens)
        self._expert_out = torch.zeros(
            *slots, spec.hidden, dtype=torch.bfloat16, device=self.device
        )
        self._out = torch.zeros(spec.tokens, spec.hidden, dtype=torch.bfloat16, device=device)
        choices = (spec.tokens, spec.topk)
        self._topk = torch.zeros(choices, dtype=self.index_dtype, device=device)
        self._weights = torch.zeros(choices, device=device)
        self._rows: tuple[torch.Tensor, ...] = ()
        self._finish: Callable[[], None] | None = None

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        self._topk.copy_(topk_idx)
        self._weights.copy_(weights)

    def dispatch_send(self, tokens: Tokens) -> None:
        received, self._counts, self._handle, _, self._finish = self._buffer.low_latency_dispatch(
            tokens.rows,
            self._topk,
            self.most_tokens,
            self.spec.experts,
            use_fp8=self.spec.dispatch_dtype is Dtype.fp8,
            round_scale=self.spec.dispatch_dtype is Dtype.fp8,
            return_recv_hook=self.capabilities.split,
        )
        self._rows = received if isinstance(received, tuple) else (received,)

    def dispatch_recv(self) -> None:
        self._complete()

    def _complete(self) -> None:
        if self.capabilities.split and self._finish is not None:
            self._finish()
            self._finish = None

    def combine_send(self) -> None:
        _, _, self._finish = self._buffer.low_latency_combine(
            self._expert_out,
            self._topk,
            self._weights,
            self._handle,
            return_recv_hook=self.capabilities.split,
            out=self._out,
        )

    def combine_recv(self) -> torch.Tensor:
        self._complete()
        return self._out

    def _filled(self) -> torch.Tensor:
        """`[L, R x M]` bool: the slots that hold a row."""
        slot = torch.arange(self._expert_out.shape[1], device=self.device)
        filled: torch.Tensor = slot < self._counts.unsqueeze(1)
        return filled

    def received(self) -> Received:
        filled = self._filled()
        expert = filled.nonzero()[:, :1] + self.rank * self.spec.local_experts
        # Each entry packs (count, first slot) of one (local expert, source) in two int32.
        from_source = self._handle[1] & 0xFFFFFFFF
        return Received(
            rows=dequantise(Tokens(*(part[filled] for part in self._rows))),
            topk_idx=expert,
            weights=None,
            source_counts=from_source.sum(0),
            expert_counts=self._counts.long(),
        )

    def apply_experts(self, factors: torch.Tensor) -> None:
        self._expert_out[self._filled()] = expert_sums(self.received(), factors).bfloat16()

    def poison(self) -> None:
        """Outputs, and what the last dispatch returned: torch hands out that memory again."""
        for part in self._rows:
            fill_nan(part)
        self._rows = ()
        self._expert_out.fill_(float("nan"))
        self._out.fill_(float("nan"))

    def wire_bytes(self, topk_idx_all: NDArray[np.int64]) -> WireBytes:
        spec = self.spec
        return wire(
            topk_idx_all,
            spec,
            "none",
            dispatch_row=HEADER_BYTES + spec.dispatch_row_bytes,
            combine_row=spec.combine_row_bytes,
            dispatch_pair=COUNT_BYTES * spec.local_experts,
            combine_pair=COUNT_BYTES * spec.local_experts,
        )

    def destroy(self) -> None:
        self._buffer.destroy()
        del self._buffer, self._expert_out, self._out, self._topk, self._weights, self._rows
