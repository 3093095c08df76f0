"""What an all-to-all library must offer to be measured, and what it must declare.

Timed are only `dispatch_send`, `dispatch_recv`, `combine_send` and `combine_recv`. Everything
else runs outside the clock: `plan`, `apply_experts`, `received`, `poison`, `wire_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ep_ray.a2a.rows import SCALE_BLOCK as SCALE_BLOCK
from ep_ray.a2a.rows import Dedup as Dedup
from ep_ray.a2a.rows import row_bytes as row_bytes
from ep_ray.config.schema import Dtype


@dataclass(frozen=True)
class Spec:
    """One workload point, the same on every rank.

    Attributes:
        ep: Ranks that share the experts.
        tokens: Tokens that each rank sends, or the most of them where `ragged`.
        hidden: Columns per row.
        experts: Experts over all ranks; rank r holds `[r, r + 1) * experts / ep`.
        topk: Experts per token.
        dispatch_dtype: Type of dispatched rows.
        combine_dtype: Type of combined rows.
        device: `cpu` or `cuda`.
        graph: Whether operations are captured in CUDA graphs and replayed.
        ragged: Whether ranks may send fewer tokens, down to none.
        shared_gpu: Whether ranks share a GPU.
    """

    ep: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    dispatch_dtype: Dtype = Dtype.fp8
    combine_dtype: Dtype = Dtype.bf16
    device: str = "cpu"
    graph: bool = False
    ragged: bool = False
    shared_gpu: bool = False

    def __post_init__(self) -> None:
        if self.ep < 1 or self.experts % self.ep:
            raise ValueError(
                f"{self.experts} experts do not divide over {self.ep} ranks;"
                " choose `workload.experts` as a multiple of every `workload.ep`"
            )
        if not 1 <= self.topk <= self.experts:
            raise ValueError(f"topk {self.topk} is not between 1 and {self.experts} experts")
        if self.tokens < 1:
            raise ValueError(f"tokens {self.tokens}: every rank must send at least one token")
        if self.hidden < SCALE_BLOCK or self.hidden % SCALE_BLOCK:
            raise ValueError(
                f"hidden {self.hidden} is not a multiple of {SCALE_BLOCK},"
                " the columns that share one scale; choose `workload.hidden` so"
            )

    @property
    def local_experts(self) -> int:
        """Experts that one rank holds."""
        return self.experts // self.ep

    @property
    def dispatch_row_bytes(self) -> int:
        """Payload of a dispatched row, without metadata: what the lower bound counts."""
        return row_bytes(self.hidden, self.dispatch_dtype)

    @property
    def combine_row_bytes(self) -> int:
        """Payload of a combined row."""
        return row_bytes(self.hidden, self.combine_dtype)


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do and what its timings contain: printed with every number.

    Attributes:
        layout: Layout of received rows, in words.
        dispatch_dtypes: Types that `dispatch` carries.
        combine_dtypes: Types that `combine` carries.
        devices: `cpu`, `cuda`.
        ep_sizes: EP sizes that work; null means any.
        split: Whether send and receive are separate calls. If not, all the work happens in
            `dispatch_send` and in `combine_send`, and the `_recv` calls do nothing.
        graph: Whether the operations can be captured in a CUDA graph. Then `plan` fills buffers
            that keep their place, since a graph replays with the addresses that it captured, and
            what a call returns is kept in attributes alone: `GraphLaunch` puts those back.
        dedup: One copy per (token, expert), per (token, rank) or per (token, node).
        quantises_inside: Whether `dispatch` takes BF16 and quantises within the clock.
        weights_applied: Where the router's weights are multiplied in.
        sums_per_rank: Whether an expert rank sums its rows of a token before they travel back.
        host_sync: Whether an operation waits for the device on the host.
        needs_nic: Whether a network card is needed even inside one node.
        dispatch_region: What is inside the clock in `dispatch`, in words.
        combine_region: What is inside the clock in `combine`, in words.
        hidden_sizes: Columns per row that work; null means any.
        topk_sizes: Experts per token that work; null means any.
        ragged: Whether `plan` takes fewer than T tokens.
        shares_gpu: Whether two ranks may sit on one GPU.
        two_sided: Whether a peer's rows reach a buffer only while this rank receives into it. If
            not, ranks meet before what they do to their buffers and what their peers write there.
    """

    layout: str
    dispatch_dtypes: frozenset[Dtype]
    combine_dtypes: frozenset[Dtype]
    devices: frozenset[str]
    ep_sizes: frozenset[int] | None
    split: bool
    graph: bool
    dedup: Dedup
    quantises_inside: bool
    weights_applied: str
    sums_per_rank: bool
    host_sync: bool
    needs_nic: bool
    dispatch_region: str
    combine_region: str
    hidden_sizes: frozenset[int] | None = None
    topk_sizes: frozenset[int] | None = None
    ragged: bool = False
    shares_gpu: bool = False
    two_sided: bool = False

    @property
    def row_dedup(self) -> Dedup:
        """How rows arrive at a rank: one per node is still one per (token, rank) there."""
        return "none" if self.dedup == "none" else "rank"

    def refusals(self, spec: Spec) -> list[str]:
        """Why this backend cannot run `spec`; empty when it can."""
        reasons = []
        if spec.device not in self.devices:
            reasons.append(f"device {spec.device}: it runs on {', '.join(sorted(self.devices))}")
        for word, dtype, allowed in (
            ("dispatch", spec.dispatch_dtype, self.dispatch_dtypes),
            ("combine", spec.combine_dtype, self.combine_dtypes),
        ):
            if dtype not in allowed:
                names = ", ".join(sorted(d.value for d in allowed))
                reasons.append(f"{word} in {dtype.value}: it carries {names}")
        for word, size, sizes in (
            ("EP", spec.ep, self.ep_sizes),
            ("hidden ", spec.hidden, self.hidden_sizes),
            ("topk ", spec.topk, self.topk_sizes),
        ):
            if sizes is not None and size not in sizes:
                reasons.append(f"{word}{size}: it runs at {sorted(sizes)}")
        if spec.graph:
            reasons += self._graph_refusals(spec)
        if spec.ragged and not self.ragged:
            reasons.append("ranks with fewer tokens: it takes the same number from each")
        if spec.shared_gpu and not self.shares_gpu:
            reasons.append("two ranks on one GPU: it takes one rank on each")
        return reasons

    def _graph_refusals(self, spec: Spec) -> list[str]:
        if spec.device != "cuda":
            return [f"launch=graph on device {spec.device}: CUDA graphs need CUDA"]
        if not self.graph:
            why = ", it waits for the device on the host" if self.host_sync else ""
            return [f"launch=graph: it cannot be captured{why}; use launch=eager"]
        return []


@dataclass(frozen=True)
class Tokens:
    """Rows to dispatch.

    Attributes:
        rows: `[T, H]`, float8_e4m3fn with scales, else bfloat16.
        scales: `[T, H / 128]` float32, or None for bfloat16.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class Received:
    """What a rank received, read out of the library's own layout for the correctness check.

    A row is one copy that travelled. With one copy per (token, expert) `topk_idx` has a
    single column.

    Attributes:
        rows: `[N, H]` float32, dequantised.
        topk_idx: `[N, K]` int64, experts of this rank that the row is for, by global number;
            -1 elsewhere.
        weights: `[N, K]` float32, or None where weights never leave the source.
        source_counts: `[R]` int64, rows per source rank as the library reports them, or None.
        expert_counts: `[L]` int64, rows per local expert as the library reports them, or None.
    """

    rows: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor | None
    source_counts: torch.Tensor | None = None
    expert_counts: torch.Tensor | None = None


@dataclass(frozen=True)
class WireBytes:
    """Bytes that cross between ranks: `[R, R]` int64, source x destination, zero diagonal."""

    dispatch: NDArray[np.int64]
    combine: NDArray[np.int64]


class Backend(Protocol):
    """An all-to-all library behind one face. One instance serves one rank."""

    capabilities: Capabilities

    def probe(self, env: Mapping[str, str]) -> list[str]:
        """Reasons why the library cannot run here, in words; empty when it can. Never hangs."""

    def setup(self, spec: Spec, group: ProcessGroup, device: torch.device) -> None:
        """Allocates buffers and communicators for `spec`; collective over `group`.

        Raises:
            ValueError: `spec` asks for what the capabilities exclude.
        """

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        """Takes the next routing: `[T, K]` int64 (-1 masks an expert) and `[T, K]` float32.

        With `ragged` it may have t < T rows: only the first t tokens are sent.
        Only moves data; whatever a model would compute per step belongs in `dispatch_send`.
        """

    def dispatch_send(self, tokens: Tokens) -> None:
        """Sends each token to the ranks of its experts; always `[T, H]` rows."""

    def dispatch_recv(self) -> None:
        """Completes the dispatch: received rows are in the library's layout."""

    def combine_send(self) -> None:
        """Sends what stands in the expert output buffer back to the sources."""

    def combine_recv(self) -> torch.Tensor:
        """Completes the combine and returns `[T, H]`, valid until the next combine.

        With t < T planned tokens only the first t rows mean anything, and there may be no more.
        """

    def apply_experts(self, factors: torch.Tensor) -> None:
        """Stands for the experts: expert e multiplies its rows by `factors[e]` (`[E]` float32).

        Fills the expert output buffer that `combine_send` sends. Timing runs without it.
        """

    def received(self) -> Received:
        """Reads the received rows out for the check."""

    def poison(self) -> None:
        """Overwrites receive and output buffers with NaN, so that stale data shows."""

    def wire_bytes(self, topk_idx_all: NDArray[np.int64]) -> WireBytes:
        """Exact bytes on the wire for the routing of all ranks, `[R, T, K]`, metadata included."""

    def destroy(self) -> None:
        """Releases buffers and communicators; collective."""
