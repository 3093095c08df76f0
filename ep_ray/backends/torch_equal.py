"""Variant `equal`: a fixed slot for every (rank, token), so that nothing is counted.

Every rank sends all its T rows to every rank, needed there or not: no counts, no host sync, and
the same shape in every step, so that a CUDA graph can replay it. The price is bytes: dispatch
moves what an all-gather of the tokens would, combine what a reduce-scatter would.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ep_ray.backends.base import Capabilities, Tokens, WireBytes
from ep_ray.backends.torch_exact import capabilities as exact_capabilities
from ep_ray.backends.torch_rows import RowAllToAll, metadata_bytes


def capabilities(device: str) -> Capabilities:
    """What equal splits offer on `device`."""
    return replace(
        exact_capabilities(device),
        layout="slots [R, T] by source rank and token, needed or not, metadata in the row",
        graph=True,
        host_sync=False,
        dispatch_region=(
            "packing of rows, scales and metadata into R x T slots, exchange of all slots"
        ),
        combine_region="exchange of all slots, float32 sum over ranks, rounding to BF16",
    )


class EqualAllToAll(RowAllToAll):
    """One slot per (token, rank), equal splits."""

    def _slots(self) -> int:
        return self.spec.ep * self.spec.tokens

    def dispatch_send(self, tokens: Tokens) -> None:
        slots = self._send[: self._pad].view(self.spec.ep, self.spec.tokens, -1)
        self._pack_payload(tokens, slots)
        ids, weights = self._metadata(slots)
        ids.copy_(self._topk)
        weights.copy_(self._weights)
        self._launch(self._recv, self._send[: self._pad])

    def combine_send(self) -> None:
        self._launch(self._back[: self._pad], self._expert_out)
        rank = self._rank_of_choice()
        token = torch.arange(self.spec.tokens, device=self.device).unsqueeze(1)
        own = rank * self.spec.tokens + token
        self._slot.copy_(torch.where(self._without_copy(rank), self._pad, own))

    def _filled(self) -> torch.Tensor:
        ids, _ = self._metadata(self._recv)
        return (self._local(ids) >= 0).any(1).nonzero().squeeze(1)

    def wire_bytes(self, topk_idx_all: NDArray[np.int64]) -> WireBytes:
        spec = self.spec
        row = spec.dispatch_row_bytes + metadata_bytes(spec.topk)
        pairs = spec.tokens * (1 - np.eye(spec.ep, dtype=np.int64))
        return WireBytes(pairs * row, pairs * spec.combine_row_bytes)
