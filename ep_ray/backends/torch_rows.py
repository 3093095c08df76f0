"""What the `all_to_all_single` backends share: the wire format, the exchange, the experts' part.

Wire format of a dispatched row, in 4-byte words, with C choices (K, or 1 per (token, expert)):
    FP8:  H / 4 words of e4m3, H / 128 float32 scales, C int32 experts, C float32 weights
    BF16: H / 2 words,                                 C int32 experts, C float32 weights
Experts are global numbers, -1 where masked: a receiver sees by their range which are its own.
A combined row is H / 2 words of BF16 and no metadata: rows return to the slots they came from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ep_ray.a2a.quantise import dequantise
from ep_ray.backends.base import SCALE_BLOCK, Capabilities, Received, Spec, Tokens, WireBytes
from ep_ray.config.schema import Dtype


def metadata_bytes(choices: int) -> int:
    """Bytes of a dispatched row beside its payload: int32 experts and float32 weights."""
    return 8 * choices


class RowAllToAll(ABC):
    """An `all_to_all_single` backend; variants differ in which rows travel in which slots.

    A slot is a row's place in the send buffer, in the order of destinations. `_slot` `[T, K]`
    holds the slot of each choice that has a copy of its own, and `_pad`, one past the last slot,
    for choices that have none (masked, or served by another choice's copy).
    """

    capabilities: Capabilities

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options:
            raise ValueError(f"`backend.options` {sorted(options)} are unknown to this variant")

    @abstractmethod
    def _slots(self) -> int:
        """Rows of the send buffer, and of the receive buffer, over all ranks."""

    @property
    def _choices(self) -> int:
        """Experts named in a row."""
        return self.spec.topk

    def setup(self, spec: Spec, group: ProcessGroup, device: torch.device) -> None:
        """Allocates for the worst routing, in which every token of every rank comes here.

        Raises:
            ValueError: The variant cannot run `spec`.
        """
        if reasons := self.capabilities.refusals(spec):
            raise ValueError("all_to_all_single cannot run this: " + "; ".join(reasons))
        self.spec, self.group, self.device = spec, group, device
        self.rank = dist.get_rank(group)
        self.payload_words = spec.dispatch_row_bytes // 4
        self._pad = self._slots()
        self._allocate(self.payload_words + metadata_bytes(self._choices) // 4)

    def _allocate(self, words: int) -> None:
        spec, slots = self.spec, self._pad
        self._packed = self._words(spec.tokens, words)
        # One row more than travels: writes and reads of choices without a slot end there.
        self._send = self._words(slots + 1, words)
        self._recv = self._words(slots, words)
        self._expert_out = self._words(slots, spec.combine_row_bytes // 4)
        self._back = self._words(slots + 1, spec.combine_row_bytes // 4)
        shape = (spec.tokens, spec.topk)
        self._topk = torch.full(shape, -1, dtype=torch.int64, device=self.device)
        self._weights = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._slot = torch.full(shape, slots, dtype=torch.int64, device=self.device)
        self._work: dist.Work | None = None
        # What `received` has read since `plan`, for the experts.
        self._last: Received | None = None

    def _words(self, rows: int, words: int) -> torch.Tensor:
        # Written at once, so that no page is touched for the first time within the clock.
        return torch.empty(rows, words, dtype=torch.int32, device=self.device).fill_(0)

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        self._last = None
        planned = len(topk_idx)
        self._topk[:planned].copy_(topk_idx)
        self._topk[planned:].fill_(-1)
        self._weights[:planned].copy_(weights)

    def _rank_of_choice(self) -> torch.Tensor:
        """`[T, K]` destination of each choice; R where it is masked."""
        rank = self._topk // self.spec.local_experts
        return torch.where(self._topk < 0, self.spec.ep, rank)

    def _without_copy(self, rank: torch.Tensor) -> torch.Tensor:
        """Choices that are masked, or to whose rank an earlier choice of the token goes."""
        repeated = (rank.unsqueeze(2) == rank.unsqueeze(1)).tril(-1).any(2)
        return repeated | (rank == self.spec.ep)

    def _pack_payload(self, tokens: Tokens, rows: torch.Tensor) -> None:
        """Fills the payload words of `rows`, `[..., T, words]`, from the tokens."""
        columns = tokens.rows.view(torch.int32)
        rows[..., : columns.shape[1]] = columns
        if tokens.scales is not None:
            rows[..., columns.shape[1] : self.payload_words] = tokens.scales.view(torch.int32)

    def _metadata(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the experts (int32) and weights (float32) inside packed rows."""
        middle = self.payload_words + self._choices
        return rows[..., self.payload_words : middle], rows[..., middle:].view(torch.float32)

    def _launch(
        self,
        got: torch.Tensor,
        sent: torch.Tensor,
        got_splits: Sequence[int] | None = None,
        sent_splits: Sequence[int] | None = None,
    ) -> None:
        """Starts an exchange, equal without split lists; `_await` completes it."""
        self._work = dist.all_to_all_single(
            got, sent, got_splits, sent_splits, group=self.group, async_op=True
        )

    def _await(self) -> None:
        """Waits: gloo on the host, NCCL only on the current stream."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def dispatch_recv(self) -> None:
        self._await()

    def combine_recv(self) -> torch.Tensor:
        self._await()
        # Sums the rows of each token in float32 and rounds once, without a copy of them.
        return torch.nn.functional.embedding_bag(
            self._slot, self._back.view(torch.bfloat16), mode="sum", padding_idx=self._pad
        )

    @abstractmethod
    def _filled(self) -> torch.Tensor:
        """Indices of the received rows that are for an expert of this rank."""

    def _local(self, ids: torch.Tensor) -> torch.Tensor:
        """Global experts `[N, C]`, -1 where they are of another rank or masked."""
        here = torch.div(ids, self.spec.local_experts, rounding_mode="floor") == self.rank
        return torch.where(here, ids, -1)

    def apply_experts(self, factors: torch.Tensor) -> None:
        got = self._last or self._read()
        assert got.weights is not None
        factor = factors.to(self.device)[got.topk_idx.clamp(min=0)]
        share = (torch.where(got.topk_idx >= 0, factor, 0.0) * got.weights).sum(1, keepdim=True)
        out = self._expert_out.view(torch.bfloat16)
        out[self._filled()] = (got.rows * share).to(torch.bfloat16)

    def received(self) -> Received:
        self._last = self._read()
        return self._last

    def _read(self) -> Received:
        recv = self._recv[self._filled()]
        ids, weights = self._metadata(recv)
        return Received(
            rows=dequantise(self._unpack(recv)),
            topk_idx=self._local(ids).long(),
            weights=weights.clone(),
            source_counts=self._source_counts(),
        )

    def _source_counts(self) -> torch.Tensor | None:
        return None

    def _unpack(self, recv: torch.Tensor) -> Tokens:
        if self.spec.dispatch_dtype is Dtype.bf16:
            return Tokens(recv[:, : self.payload_words].contiguous().view(torch.bfloat16))
        middle = self.payload_words - self.spec.hidden // SCALE_BLOCK
        return Tokens(
            recv[:, :middle].contiguous().view(torch.float8_e4m3fn),
            recv[:, middle : self.payload_words].contiguous().view(torch.float32),
        )

    def poison(self) -> None:
        # All bits set are a NaN in e4m3, in bfloat16 and in float32, and expert -1.
        for buffer in (self._recv, self._expert_out, self._back):
            buffer.fill_(-1)

    @abstractmethod
    def wire_bytes(self, topk_idx_all: NDArray[Any]) -> WireBytes:
        """Exact bytes on the wire, padding and metadata included."""

    def destroy(self) -> None:
        del self._packed, self._send, self._recv, self._expert_out, self._back
        del self._topk, self._weights, self._slot
