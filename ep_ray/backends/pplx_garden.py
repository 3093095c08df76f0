"""Perplexity's point-to-point all-to-all: RDMA between nodes without SMs, NVLink inside.

One copy per (token, expert), packed by local expert into the caller's buffers. Up to
`max_private_tokens` per rank are written before the receiver has said where rows go: it changes
the protocol, so it is an option and belongs beside every number. Combine applies the router's
weights at the source.
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
    refuse_masked,
    take_options,
    wire,
)
from ep_ray.config.schema import Dtype

WRITTEN_AGAINST = "pplx-garden at commit 2446003"
HOW = "build pplx-garden from source (github.com/perplexityai/pplx-garden); it has no wheel"
AUTOMATIC = -1
"""`max_private_tokens`: the library takes 1.2 times the mean load."""
DEFAULTS = {"nets_per_gpu": 1, "max_private_tokens": AUTOMATIC}
METADATA_BYTES = 16

CAPABILITIES = Capabilities(
    layout="packed by local expert, one row per (token, expert)",
    dispatch_dtypes=BOTH_DTYPES,
    combine_dtypes=BF16_ONLY,
    devices=CUDA,
    ep_sizes=None,
    split=True,
    graph=True,
    dedup="none",
    quantises_inside=False,
    weights_applied="in combine at the source rank, inside the clock",
    sums_per_rank=False,
    host_sync=False,
    needs_nic=True,
    dispatch_region=(
        "cast of top-k to uint32, counts exchange, send, receive, copy into the buffers"
    ),
    combine_region="send, receive, weighted sum",
)


class PplxGarden:
    """`P2PAllToAll`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = take_options("pplx_garden", options, DEFAULTS)
        self.capabilities = CAPABILITIES

    def probe(self, env: Mapping[str, str]) -> list[str]:
        reasons = probing.python((3, 12), "pplx_garden uses typing.override")
        reasons += probing.package("pplx_garden", HOW)
        reasons += probing.gpu() + probing.nic() + probing.gdrcopy()
        return reasons or probing.imports("pplx_garden.kernels.p2p_all_to_all")

    def setup(self, spec: Spec, group: ProcessGroup, device: torch.device) -> None:
        refuse("pplx_garden", self.capabilities, spec)
        self.spec, self.device, self.rank = spec, device, dist.get_rank(group)
        self._a2a = self._open(group)
        fp8 = spec.dispatch_dtype is Dtype.fp8
        most = spec.ep * spec.tokens * min(spec.topk, spec.local_experts)
        row_type = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self._rows = torch.zeros(most, spec.hidden, device=device, dtype=row_type)
        blocks = spec.hidden // SCALE_BLOCK
        self._scales = torch.zeros(most, blocks, device=device) if fp8 else None
        self._counts = torch.zeros(spec.local_experts, dtype=torch.int32, device=device)
        self._expert_out = torch.zeros(most, spec.hidden, dtype=torch.bfloat16, device=device)
        self._out = torch.zeros(spec.tokens, spec.hidden, dtype=torch.bfloat16, device=device)
        choices = (spec.tokens, spec.topk)
        self._topk = torch.zeros(choices, dtype=torch.int64, device=device)
        self._weights = torch.zeros(choices, device=device)

    def _open(self, group: ProcessGroup) -> Any:
        spec, fp8 = self.spec, self.spec.dispatch_dtype is Dtype.fp8
        private = self._options["max_private_tokens"]
        near = _node_group(group, min(spec.ep, node_size(gather_hosts(group))))
        return import_module("pplx_garden.kernels.p2p_all_to_all").P2PAllToAll(
            max_num_tokens=spec.tokens,
            num_experts=spec.experts,
            expert_padding=1,
            hidden_dim=spec.hidden,
            hidden_dim_scale=spec.hidden // SCALE_BLOCK if fp8 else None,
            in_dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16,
            out_dtype=torch.bfloat16,
            scale_dtype=torch.float32 if fp8 else None,
            num_experts_per_token=spec.topk,
            nets_per_gpu=self._options["nets_per_gpu"],
            max_private_tokens=None if private == AUTOMATIC else private,
            device=self.device,
            dp_group=None,
            node_group=near,
            global_group=_Group(group),
        )

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        refuse_masked("pplx_garden", topk_idx)
        self._topk.copy_(topk_idx)
        self._weights.copy_(weights)

    def dispatch_send(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._indices = self._topk.int().view(torch.uint32)
        self._dispatch(do_send=True, do_recv=False)

    def dispatch_recv(self) -> None:
        self._dispatch(do_send=False, do_recv=True)

    def _dispatch(self, *, do_send: bool, do_recv: bool) -> None:
        self._a2a.dispatch(
            out_expert_num_tokens=self._counts,
            out_expert_x=self._rows,
            out_expert_x_scale=self._scales,
            dp_x=self._tokens.rows,
            dp_x_scale=self._tokens.scales,
            indices=self._indices,
            weights=self._weights,
            do_send=do_send,
            do_recv=do_recv,
        )

    def combine_send(self) -> None:
        self._combine(do_send=True, do_recv=False)

    def combine_recv(self) -> torch.Tensor:
        self._combine(do_send=False, do_recv=True)
        return self._out

    def _combine(self, *, do_send: bool, do_recv: bool) -> None:
        self._a2a.combine(
            out_tokens=self._out,
            indices=self._indices,
            weights=self._weights,
            expert_y=self._expert_out,
            do_send=do_send,
            do_recv=do_recv,
        )

    def received(self) -> Received:
        counts = self._counts.long()
        total = int(counts.sum())
        first = self.rank * self.spec.local_experts
        experts = first + torch.arange(self.spec.local_experts, device=self.device)
        scales = None if self._scales is None else self._scales[:total]
        return Received(
            rows=dequantise(Tokens(self._rows[:total], scales)),
            topk_idx=experts.repeat_interleave(counts).unsqueeze(1),
            weights=None,
            expert_counts=counts,
        )

    def apply_experts(self, factors: torch.Tensor) -> None:
        sums = expert_sums(self.received(), factors)
        self._expert_out[: len(sums)] = sums.bfloat16()

    def poison(self) -> None:
        for buffer in (self._rows, self._scales, self._counts, self._expert_out, self._out):
            if buffer is not None:
                fill_nan(buffer)

    def wire_bytes(self, topk_idx_all: NDArray[np.int64]) -> WireBytes:
        spec = self.spec
        fp8 = spec.dispatch_dtype is Dtype.fp8
        scales = align(4 * (spec.hidden // SCALE_BLOCK), 16) if fp8 else 0
        payload = align(spec.hidden if fp8 else 2 * spec.hidden, 16)
        return wire(
            topk_idx_all,
            spec,
            "none",
            dispatch_row=payload + scales + METADATA_BYTES,
            combine_row=align(spec.combine_row_bytes, 16),
            dispatch_pair=4 * spec.experts,  # each rank tells every other all its counts
            combine_pair=0,
        )

    def destroy(self) -> None:
        self._a2a.destroy()
        del self._a2a, self._rows, self._scales, self._expert_out, self._out


class _Group:
    """The part of the library's ParallelGroup that `P2PAllToAll` uses."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather_object(self, mine: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, mine, group=self._group)
        return gathered

    def barrier(self) -> None:
        dist.barrier(self._group)


def _node_group(group: ProcessGroup, size: int) -> _Group | None:
    """The ranks of this rank's node, whose rows go over NVLink; None for a lone rank."""
    ranks = dist.get_process_group_ranks(group)
    if size == 1:
        return None
    if size == len(ranks):
        return _Group(group)
    mine = None
    for start in range(0, len(ranks), size):
        members = dist.new_group(ranks[start : start + size])
        if start <= dist.get_rank(group) < start + size:
            mine = _Group(members)
    return mine
