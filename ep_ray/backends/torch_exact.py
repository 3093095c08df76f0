"""Variant `exact`: only the rows that someone needs travel, by split lists on the host.

The split lists must be on the host before rows can travel, so a dispatch exchanges counts
first and waits for them: that is part of its price, and inside the clock.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ep_ray.a2a.routing import copies
from ep_ray.backends.base import Capabilities, Tokens, WireBytes
from ep_ray.backends.torch_rows import RowAllToAll, metadata_bytes
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
        split=True,
        graph=False,
        dedup="rank",
        quantises_inside=False,
        weights_applied="on the expert rank with the expert, outside the clock",
        sums_per_rank=True,
        host_sync=True,
        needs_nic=False,
        dispatch_region=(
            "layout from top-k, counts exchange, host sync for the split lists,"
            " packing of rows, scales and metadata, row exchange"
        ),
        combine_region="row exchange, float32 sum over ranks, rounding to BF16",
        ragged=True,
        shares_gpu=True,
        two_sided=True,
    )


class ExactAllToAll(RowAllToAll):
    """One copy per (token, rank), exact split lists."""

    def _slots(self) -> int:
        return self.spec.ep * self.spec.tokens

    def dispatch_send(self, tokens: Tokens) -> None:
        token, send_counts = self._layout()
        recv_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(recv_counts, send_counts, group=self.group)
        # The device packs while the host waits for the counts.
        self._pack(tokens)
        self._sent, self._got = torch.stack((send_counts, recv_counts)).tolist()
        rows = sum(self._sent)
        torch.index_select(self._packed, 0, token[:rows], out=self._send[:rows])
        self._launch(self._recv[: sum(self._got)], self._send[:rows], self._got, self._sent)

    def _layout(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token of each slot (padded to all slots) and rows per rank; fills `_slot`."""
        ep, tokens, slots = self.spec.ep, self.spec.tokens, self._pad
        rank = self._rank_of_choice()
        reach = torch.zeros(tokens, ep + 1, dtype=torch.bool, device=self.device)
        reach.scatter_(1, rank, True)
        by_rank = reach[:, :ep].t()
        slot = torch.where(by_rank, by_rank.flatten().cumsum(0).view(ep, tokens) - 1, slots)
        token = torch.empty(slots + 1, dtype=torch.int64, device=self.device)
        token.scatter_(0, slot.flatten(), torch.arange(tokens, device=self.device).repeat(ep))
        own = slot.t().gather(1, rank.clamp(max=ep - 1))
        self._slot.copy_(torch.where(self._without_copy(rank), slots, own))
        return token, by_rank.sum(1)

    def _pack(self, tokens: Tokens) -> None:
        self._pack_payload(tokens, self._packed)
        ids, weights = self._metadata(self._packed)
        ids.copy_(self._topk)
        weights.copy_(self._weights)

    def combine_send(self) -> None:
        back, out = self._back[: sum(self._sent)], self._expert_out[: sum(self._got)]
        self._launch(back, out, self._sent, self._got)

    def _filled(self) -> torch.Tensor:
        return torch.arange(sum(self._got), device=self.device)

    def _source_counts(self) -> torch.Tensor:
        return torch.tensor(self._got, device=self.device)

    def wire_bytes(self, topk_idx_all: NDArray[np.int64]) -> WireBytes:
        spec = self.spec
        rows = copies(topk_idx_all, spec.experts, spec.ep, "rank")
        dispatch = rows * (spec.dispatch_row_bytes + metadata_bytes(spec.topk)) + COUNT_BYTES
        combine = rows.T * spec.combine_row_bytes
        np.fill_diagonal(dispatch, 0)
        np.fill_diagonal(combine, 0)
        return WireBytes(dispatch, combine)
