"""NCCL EP (`nccl.ep`), low-latency algorithm with the rank-major layout.

The rank-major layout sends one row per (token, rank) both ways; the library's expert-major layout
would send one per (token, expert) back. FP8 rows and their scales are forwarded as they are. The
kernels are compiled by nvcc at first use. NCCL 2.30.7 must be the one NCCL of the process, torch
included: start with LD_PRELOAD=<site-packages>/nvidia/nccl/lib/libnccl.so.2.
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
    wire,
)
from ep_ray.config.schema import Dtype

WRITTEN_AGAINST = "nccl-extensions 0.1.0, nccl4py 0.6.0, NCCL 2.30.7"
HOW = "pip install nccl-extensions==0.1.0 nccl4py==0.6.0 nvidia-nccl-cu13==2.30.7"
LEAST_NCCL = (2, 30, 7)
TIMEOUT_NS = 10_000_000_000
"""After which a kernel that waits for a silent rank traps."""
COUNT_BYTES = 4


def capabilities(split: bool) -> Capabilities:
    """What `nccl.ep` offers; `split` separates send and receive."""
    return Capabilities(
        layout="[R, M, H] padded per source rank, one row per (token, rank)",
        dispatch_dtypes=BOTH_DTYPES,
        combine_dtypes=BF16_ONLY,
        devices=CUDA,
        ep_sizes=frozenset({1, 2, 4, *range(8, 65, 8)}),
        split=split,
        graph=True,
        dedup="rank",
        quantises_inside=False,
        weights_applied="on the expert rank with the expert, outside the clock",
        sums_per_rank=True,
        host_sync=False,
        needs_nic=False,
        dispatch_region="binding of top-k, send, receive, copy into the rank-major layout",
        combine_region="staging copy of expert outputs, send, receive, sum over ranks",
        # The scale row of 4 x H / 128 bytes must be a multiple of 16.
        hidden_sizes=frozenset(range(512, 16385, 512)),
        topk_sizes=frozenset(range(1, 31)),
    )


class NcclEp:
    """`nccl.ep.Group` and one `Handle`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.capabilities = capabilities(
            take_options("nccl_ep", options, {"split": False})["split"]
        )

    def probe(self, env: Mapping[str, str]) -> list[str]:
        reasons = probing.package("nccl.ep", HOW)
        reasons += probing.package("cuda", "pip install cuda-bindings cuda-core")
        reasons += probing.compiler(env) + probing.gpu() + probing.nccl(LEAST_NCCL)
        return reasons or probing.imports("nccl.ep")

    def setup(self, spec: Spec, group: ProcessGroup, device: torch.device) -> None:
        refuse("nccl_ep", self.capabilities, spec)
        self.spec, self.device, self.rank = spec, device, dist.get_rank(group)
        self._ep = import_module("nccl.ep")
        self._allocate()
        self._describe()
        interop = import_module("nccl.ep.interop.torch")
        self._comm = interop.get_nccl_comm_from_group(group)
        self._group = self._ep.Group.create(self._comm, self._group_config())
        # Collective, and it allocates: once. `update` rebinds the routing at every step.
        self._handle = self._group.create_handle(
            self._ep.Layout.RANK_MAJOR, self._choices, stream=_stream()
        )

    def _group_config(self) -> Any:
        spec = self.spec
        return self._ep.GroupConfig(
            algorithm=self._ep.Algorithm.LOW_LATENCY,
            num_experts=spec.experts,
            max_dispatch_tokens_per_rank=spec.tokens,
            max_token_bytes=max(spec.dispatch_row_bytes, spec.combine_row_bytes),
            timeout_ns=TIMEOUT_NS,
            num_topk=spec.topk,
        )

    def _allocate(self) -> None:
        spec, slots = self.spec, (self.spec.ep, self.spec.tokens)
        fp8 = spec.dispatch_dtype is Dtype.fp8
        row_type = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self._topk = self._zeros((spec.tokens, spec.topk), torch.int64)
        self._weights = self._zeros((spec.tokens, spec.topk), torch.float32)
        self._got_rows = self._zeros((*slots, spec.hidden), row_type)
        self._got_scales = (
            self._zeros((*slots, spec.hidden // SCALE_BLOCK), torch.float32) if fp8 else None
        )
        self._got_topk = self._zeros((*slots, spec.topk), torch.int32)
        self._got_weights = self._zeros((*slots, spec.topk), torch.float32)
        self._counts = self._zeros((spec.ep,), torch.int32)
        self._expert_out = self._zeros((*slots, spec.hidden), torch.bfloat16)
        self._out = self._zeros((spec.tokens, spec.hidden), torch.bfloat16)

    def _describe(self) -> None:
        """Everything that stays the same from step to step."""
        ep, split = self._ep, int(self.capabilities.split)
        recipe = ep.DispatchQuantizationRecipe
        self._tokens: Tokens | None = None
        self._choices = self._described(self._topk)
        self._output = ep.DispatchOutputs(
            tokens=self._described(self._got_rows),
            topk_weights=self._described(self._got_weights),
            scales=self._described(self._got_scales),
            topk_idx=self._described(self._got_topk),
        )
        self._layout_info = ep.LayoutInfo(
            src_rank_counters=self._described(self._counts),
            recv_topk_idx_kind=ep.ExpertIdKind.GLOBAL,
        )
        self._dispatch_config = ep.DispatchConfig(
            send_only=split,
            quantization_recipe=recipe.NONE if self._got_scales is None else recipe.FWD,
        )
        self._combine_input = ep.CombineInputs(tokens=self._described(self._expert_out))
        self._combine_output = ep.CombineOutputs(tokens=self._described(self._out))
        self._combine_config = ep.CombineConfig(send_only=split)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _described(self, tensor: torch.Tensor | None) -> Any:
        """The library's descriptor, which keeps the tensor alive; None for None."""
        return None if tensor is None else self._ep.Tensor(tensor)

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        self._topk.copy_(topk_idx)
        self._weights.copy_(weights)

    def dispatch_send(self, tokens: Tokens) -> None:
        self._handle.update(self._choices, stream=_stream())
        self._handle.dispatch(
            self._input(tokens),
            self._output,
            layout_info=self._layout_info,
            config=self._dispatch_config,
            stream=_stream(),
        )

    def _input(self, tokens: Tokens) -> Any:
        # Descriptors are made in Python: once per payload, not within the clock at every step.
        if tokens is not self._tokens:
            self._tokens = tokens
            self._described_tokens = self._ep.DispatchInputs(
                tokens=self._described(tokens.rows),
                topk_weights=self._described(self._weights),
                scales=self._described(tokens.scales),
            )
        return self._described_tokens

    def dispatch_recv(self) -> None:
        self._complete()

    def _complete(self) -> None:
        if self.capabilities.split:
            self._handle.complete(stream=_stream())

    def combine_send(self) -> None:
        self._handle.combine(
            self._combine_input,
            self._combine_output,
            config=self._combine_config,
            stream=_stream(),
        )

    def combine_recv(self) -> torch.Tensor:
        self._complete()
        return self._out

    def _filled(self) -> torch.Tensor:
        """`[R, M]` bool: the slots that hold a row."""
        return torch.arange(self.spec.tokens, device=self.device) < self._counts.unsqueeze(1)

    def received(self) -> Received:
        filled = self._filled()
        scales = None if self._got_scales is None else self._got_scales[filled]
        return Received(
            rows=dequantise(Tokens(self._got_rows[filled], scales)),
            topk_idx=self._got_topk[filled].long(),
            weights=self._got_weights[filled],
            source_counts=self._counts.long(),
        )

    def apply_experts(self, factors: torch.Tensor) -> None:
        self._expert_out[self._filled()] = expert_sums(self.received(), factors).bfloat16()

    def poison(self) -> None:
        buffers = (self._got_rows, self._got_scales, self._got_topk, self._got_weights)
        for buffer in (*buffers, self._counts, self._expert_out, self._out):
            if buffer is not None:
                fill_nan(buffer)

    def wire_bytes(self, topk_idx_all: NDArray[np.int64]) -> WireBytes:
        spec = self.spec
        # Header: the token's index, then 8 bytes per choice, padded to 16.
        header = align(4 + 8 * spec.topk, 16)
        return wire(
            topk_idx_all,
            spec,
            "rank",
            dispatch_row=header + spec.dispatch_row_bytes,
            combine_row=spec.combine_row_bytes,
            dispatch_pair=COUNT_BYTES * spec.local_experts,
            combine_pair=COUNT_BYTES * spec.local_experts,
        )

    def destroy(self) -> None:
        self._handle.destroy()
        self._group.destroy()
        self._comm.destroy()
        # Descriptors hold the buffers.
        del self._output, self._layout_info, self._combine_input, self._combine_output
        del self._got_rows, self._got_scales, self._expert_out, self._out


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
