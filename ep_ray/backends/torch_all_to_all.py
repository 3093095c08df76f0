"""All-to-all through `torch.distributed.all_to_all_single` with exact split lists.

The split lists must be on the host before rows can travel, so a dispatch exchanges counts
first and waits for them: that is part of its price, and inside the clock.

Wire format of a dispatched row, in 4-byte words:
    FP8:  H / 4 words of e4m3, H / 128 float32 scales, K int32 local experts, K float32 weights
    BF16: H / 2 words,                                 K int32 local experts, K float32 weights
A local expert is -1 where that choice went to another rank. A combined row is H / 2 words of
BF16 and no metadata: rows return in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ep_ray.a2a.quantise import dequantise
from ep_ray.a2a.routing import copies
from ep_ray.backends.base import SCALE_BLOCK, Capabilities, Received, Spec, Tokens, WireBytes
from ep_ray.config.schema import Dtype

COUNT_BYTES = 8
"""Every rank tells every other how many rows will come, as one int64."""


def capabilities(device: str) -> Capabilities:
    """What `all_to_all_single` with split lists offers on `device`."""
    return Capabilities(
        layout="packed rows by source rank, one per (token, rank), metadata in the row",
        dispatch_dtypes=frozenset({Dtype.fp8, Dtype.bf16}),
        combine_dtypes=frozenset({Dtype.bf16}),
        devices=frozenset({device}),
        ep_sizes=None,
        split=False,
        graph=False,
        dedup="rank",
        quantises_inside=False,
        weights_applied="on the expert rank with the expert, outside the clock",
        sums_per_rank=True,
        host_sync=True,
        needs_nic=False,
        dispatch_region=(
            "layout from top-k, packing of rows, scales and metadata, counts exchange,"
            " host sync for the split lists, row exchange"
        ),
        combine_region="row exchange, float32 sum over ranks, rounding to BF16",
    )


def metadata_bytes(topk: int) -> int:
    """Bytes of a dispatched row beside its payload: K int32 experts and K float32 weights."""
    return 8 * topk


class TorchAllToAll:
    """Common part of the gloo and NCCL backends; see the module's description."""

    def __init__(self, options: Mapping[str, Any], device: str) -> None:
        if options:
            raise ValueError(
                f"`backend.options` {sorted(options)} are unknown: all_to_all_single has none"
            )
        self.capabilities = capabilities(device)

    def setup(self, spec: Spec, group: ProcessGroup, device: torch.device) -> None:
        """Allocates for the worst routing, in which every token of every rank comes here."""
        if reasons := self.capabilities.refusals(spec):
            raise ValueError("all_to_all_single cannot run this: " + "; ".join(reasons))
        self.spec, self.group, self.device = spec, group, device
        self.rank = dist.get_rank(group)
        self.payload_words = spec.dispatch_row_bytes // 4
        words = self.payload_words + metadata_bytes(spec.topk) // 4
        most = spec.ep * spec.tokens
        self._packed = self._words(spec.tokens, words)
        self._send = self._words(most, words)
        self._recv = self._words(most, words)
        self._expert_out = self._words(most, spec.combine_row_bytes // 4)
        self._back = self._words(most, spec.combine_row_bytes // 4)
        self._sum = torch.empty(spec.tokens, spec.hidden, device=device)
        self._out = torch.empty(spec.tokens, spec.hidden, dtype=torch.bfloat16, device=device)

    def _words(self, rows: int, words: int) -> torch.Tensor:
        # Written at once, so that no page is touched for the first time within the clock.
        return torch.empty(rows, words, dtype=torch.int32, device=self.device).fill_(0)

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        self._topk = topk_idx.to(self.device)
        self._weights = weights.to(self.device)

    def dispatch_send(self, tokens: Tokens) -> None:
        rank, self._token, send_counts = self._layout()
        recv_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(recv_counts, send_counts, group=self.group)
        self._pack(tokens, rank)
        self._sent, self._got = torch.stack((send_counts, recv_counts)).tolist()
        dist.all_to_all_single(
            self._recv[: sum(self._got)],
            self._send[: len(self._token)],
            self._got,
            self._sent,
            group=self.group,
        )

    def _layout(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Destination rank and token of every row to send, by rank, and rows per rank."""
        ep = self.spec.ep
        # Column `ep` collects masked experts.
        rank = torch.where(self._topk < 0, ep, self._topk // self.spec.local_experts)
        reach = torch.zeros(len(rank), ep + 1, dtype=torch.bool, device=self.device)
        reach.scatter_(1, rank, True)
        reach = reach[:, :ep]
        destination, token = reach.t().nonzero(as_tuple=True)
        return destination, token, reach.sum(0)

    def _pack(self, tokens: Tokens, rank: torch.Tensor) -> None:
        self._pack_payload(tokens)
        send = self._send[: len(self._token)]
        torch.index_select(self._packed, 0, self._token, out=send)
        local = self._topk[self._token] - (rank * self.spec.local_experts).unsqueeze(1)
        here = (local >= 0) & (local < self.spec.local_experts)
        ids, weights = self._metadata(send)
        ids.copy_(torch.where(here, local, -1))
        weights.copy_(self._weights[self._token])

    def _pack_payload(self, tokens: Tokens) -> None:
        columns = tokens.rows.view(torch.int32)
        self._packed[:, : columns.shape[1]] = columns
        if tokens.scales is not None:
            scales = tokens.scales.view(torch.int32)
            self._packed[:, columns.shape[1] : self.payload_words] = scales

    def _metadata(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the local experts (int32) and weights (float32) inside packed rows."""
        middle = self.payload_words + self.spec.topk
        return rows[:, self.payload_words : middle], rows[:, middle:].view(torch.float32)

    def dispatch_recv(self) -> None:
        """Nothing: `dispatch_send` has done it."""

    def combine_send(self) -> None:
        back = self._back[: len(self._token)]
        dist.all_to_all_single(
            back, self._expert_out[: sum(self._got)], self._sent, self._got, group=self.group
        )
        rows = back.view(torch.bfloat16).float()
        self._out.copy_(self._sum.zero_().index_add_(0, self._token, rows))

    def combine_recv(self) -> torch.Tensor:
        return self._out

    def apply_experts(self, factors: torch.Tensor) -> None:
        got = self.received()
        assert got.weights is not None
        here = got.topk_idx >= 0
        factor = factors.to(self.device)[got.topk_idx.clamp(min=0)]
        share = (torch.where(here, factor, 0.0) * got.weights).sum(1, keepdim=True)
        out = self._expert_out[: len(got.rows)].view(torch.bfloat16)
        out.copy_(got.rows * share)

    def received(self) -> Received:
        recv = self._recv[: sum(self._got)]
        ids, weights = self._metadata(recv)
        first = self.rank * self.spec.local_experts
        return Received(
            rows=dequantise(self._unpack(recv)),
            topk_idx=torch.where(ids >= 0, ids + first, -1).long(),
            weights=weights.clone(),
            source_counts=torch.tensor(self._got, device=self.device),
        )

    def _unpack(self, recv: torch.Tensor) -> Tokens:
        if self.spec.dispatch_dtype is Dtype.bf16:
            return Tokens(recv[:, : self.payload_words].contiguous().view(torch.bfloat16))
        middle = self.payload_words - self.spec.hidden // SCALE_BLOCK
        return Tokens(
            recv[:, :middle].contiguous().view(torch.float8_e4m3fn),
            recv[:, middle : self.payload_words].contiguous().view(torch.float32),
        )

    def poison(self) -> None:
        # All bits set are a NaN in e4m3, in bfloat16 and in float32.
        for buffer in (self._recv, self._expert_out, self._back):
            buffer.fill_(-1)
        self._out.fill_(float("nan"))

    def wire_bytes(self, topk_idx_all: NDArray[np.int64]) -> WireBytes:
        spec = self.spec
        rows = copies(topk_idx_all, spec.experts, spec.ep, "rank")
        row = spec.dispatch_row_bytes + metadata_bytes(spec.topk)
        dispatch = rows * row + COUNT_BYTES
        combine = rows.T * spec.combine_row_bytes
        np.fill_diagonal(dispatch, 0)
        np.fill_diagonal(combine, 0)
        return WireBytes(dispatch, combine)

    def destroy(self) -> None:
        del self._packed, self._send, self._recv, self._expert_out, self._back, self._sum, self._out
