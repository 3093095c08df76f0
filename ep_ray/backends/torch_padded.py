"""Variant `padded`: one copy per (token, expert), a fixed number of slots per destination.

Nothing is counted and nothing is dropped: without the option `capacity` a destination has slots
for every copy that a rank can send it, T x min(K, L). With it the slots are as many as asked
for, and a routing that needs more is an error when it is planned, outside the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ep_ray.backends.base import Capabilities, Tokens, WireBytes
from ep_ray.backends.torch_exact import capabilities as exact_capabilities
from ep_ray.backends.torch_rows import RowAllToAll, metadata_bytes


def capabilities(device: str) -> Capabilities:
    """What padded slots offer on `device`."""
    return replace(
        exact_capabilities(device),
        layout="slots by source rank, one per (token, expert), padded to the capacity",
        graph=True,
        dedup="none",
        sums_per_rank=False,
        host_sync=False,
        dispatch_region=(
            "slots from top-k, packing of rows, scales and metadata, exchange of all slots"
        ),
        combine_region="exchange of all slots, float32 sum over experts, rounding to BF16",
    )


class PaddedAllToAll(RowAllToAll):
    """One slot per (token, expert), equal splits of a fixed capacity."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        rest = dict(options)
        capacity = rest.pop("capacity", None)
        super().__init__(rest)
        if capacity is not None and (type(capacity) is not int or capacity < 1):
            raise ValueError(
                f"`backend.options.capacity={capacity}`: rows per destination rank, at least 1;"
                " leave it out for the worst case"
            )
        self._asked = capacity

    @property
    def capacity(self) -> int:
        """Slots per destination rank."""
        worst = self.spec.tokens * min(self.spec.topk, self.spec.local_experts)
        return worst if self._asked is None else min(self._asked, worst)

    @property
    def _choices(self) -> int:
        return 1

    def _slots(self) -> int:
        return self.spec.ep * self.capacity

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        """As every backend's.

        Raises:
            ValueError: A destination needs more slots than the option `capacity` gives.
        """
        super().plan(topk_idx, weights)
        if self._asked is not None:
            self._refuse_overflow()

    def _refuse_overflow(self) -> None:
        rank = self._rank_of_choice().flatten()
        rows = torch.bincount(rank, minlength=self.spec.ep + 1)[: self.spec.ep]
        most = int(rows.max())
        if most > self.capacity:
            raise ValueError(
                f"this routing sends {most} rows to rank {int(rows.argmax())}, more than"
                f" `backend.options.capacity={self._asked}`; raise it, or leave it out for the"
                " worst case"
            )

    def dispatch_send(self, tokens: Tokens) -> None:
        self._place()
        self._pack_payload(tokens, self._packed)
        payload = self._packed[:, : self.payload_words].unsqueeze(1)
        self._send[:, : self.payload_words].index_put_((self._slot,), payload)
        ids, weights = self._metadata(self._send)
        ids.fill_(-1)
        ids[:, 0].index_put_((self._slot,), self._topk.int())
        weights[:, 0].index_put_((self._slot,), self._weights)
        self._launch(self._recv, self._send[: self._pad])

    def _place(self) -> None:
        """Gives the choices of each destination its slots in the order of tokens."""
        rank = self._rank_of_choice()
        # Destinations are rows, since a scan along columns is sequential on a GPU.
        destination = torch.arange(self.spec.ep + 1, device=self.device).unsqueeze(1)
        upto = (destination == rank.view(1, -1)).cumsum(1)
        before = upto.gather(0, rank.view(1, -1)).view_as(rank) - 1
        self._slot.copy_(
            torch.where(rank == self.spec.ep, self._pad, rank * self.capacity + before)
        )

    def combine_send(self) -> None:
        self._launch(self._back[: self._pad], self._expert_out)

    def _filled(self) -> torch.Tensor:
        ids, _ = self._metadata(self._recv)
        return (ids[:, 0] >= 0).nonzero().squeeze(1)

    def wire_bytes(self, topk_idx_all: NDArray[np.int64]) -> WireBytes:
        spec = self.spec
        row = spec.dispatch_row_bytes + metadata_bytes(1)
        pairs = self.capacity * (1 - np.eye(spec.ep, dtype=np.int64))
        return WireBytes(pairs * row, pairs * spec.combine_row_bytes)
