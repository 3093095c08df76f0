"""FlashInfer's one-sided all-to-all (`MoeAlltoAll`, from TensorRT-LLM): NVLink only.

Dispatch pushes each row once per (token, rank) into `[R, M, *]` of the receiver; combine pulls
the experts' sums from there and adds them in BF16. Expert outputs are written into the library's
workspace, so that no staging copy is timed. The kernels are compiled at first use, which takes
minutes and needs nvcc and ninja; the file descriptors that ranks exchange need pidfd_getfd
(in a container: the capability SYS_PTRACE).
"""

from __future__ import annotations

import platform
import shutil
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
from ep_ray.backends.base import Capabilities, Received, Spec, Tokens, WireBytes
from ep_ray.backends.layouts import (
    BF16_ONLY,
    BOTH_DTYPES,
    CUDA,
    expert_sums,
    fill_nan,
    local_only,
    refuse,
    refuse_masked,
    take_options,
    wire,
)

WRITTEN_AGAINST = "flashinfer-python 0.6.12"
HOW = "pip install flashinfer-python==0.6.12"
MOST_RANKS = 64
WORD_BYTES = 4
"""Per pair of ranks: a count and a flag in dispatch, a flag in combine."""

CAPABILITIES = Capabilities(
    layout="[R, M, *] padded per source rank, one row per (token, rank)",
    dispatch_dtypes=BOTH_DTYPES,
    combine_dtypes=BF16_ONLY,
    devices=CUDA,
    ep_sizes=frozenset(range(1, MOST_RANKS + 1)),
    split=False,
    graph=True,
    dedup="rank",
    quantises_inside=False,
    weights_applied="on the expert rank with the expert, outside the clock",
    sums_per_rank=True,
    host_sync=False,
    needs_nic=False,
    dispatch_region=(
        "cast of top-k to int32, push of rows, scales, experts and weights, wait for all"
        " sources, marking of unfilled slots"
    ),
    combine_region="barrier, pull of rows, sum over ranks in BF16, allocation of the output",
    topk_sizes=frozenset({1, 2, 4, 6, 8, 10, 16, 22}),
)


class FlashInfer:
    """`MoeAlltoAll`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        take_options("flashinfer", options, {})
        self.capabilities = CAPABILITIES

    def probe(self, env: Mapping[str, str]) -> list[str]:
        reasons = probing.package("flashinfer", HOW)
        reasons += probing.package("pynvml", "pip install nvidia-ml-py")
        reasons += probing.package("cuda", "pip install cuda-bindings of torch's CUDA version")
        if shutil.which("ninja") is None:
            reasons.append("kernels are compiled at first use and there is no ninja on PATH")
        reasons += probing.compiler(env) + probing.gpu()
        return reasons or probing.imports("flashinfer.comm")

    def setup(self, spec: Spec, group: ProcessGroup, device: torch.device) -> None:
        refuse("flashinfer", self.capabilities, spec)
        if platform.machine() != "aarch64" and node_size(gather_hosts(group)) < spec.ep:
            raise ValueError(f"flashinfer reaches over NVLink only and EP{spec.ep} spans nodes")
        self.spec, self.device, self.rank = spec, device, dist.get_rank(group)
        self._a2a = _open(spec, group, self.rank)
        choices = (spec.tokens, spec.topk)
        self._topk = torch.zeros(choices, dtype=torch.int64, device=device)
        self._weights = torch.zeros(choices, device=device)
        self._got: list[torch.Tensor] = []
        self._out: torch.Tensor | None = None
        self._pending = False

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor) -> None:
        """Also ends a dispatch that was timed alone: the library wants them in turn."""
        refuse_masked("flashinfer", topk_idx)
        # Replays pass by the library's Python side, where the turns are kept.
        if self._pending and not self.spec.graph:
            self.combine_send()
        self._topk.copy_(topk_idx)
        self._weights.copy_(weights)

    def dispatch_send(self, tokens: Tokens) -> None:
        topk = self._topk.int()
        scales = [] if tokens.scales is None else [tokens.scales]
        self._got = self._a2a.dispatch(
            topk,
            [tokens.rows, *scales, topk, self._weights],
            self.spec.tokens,
            invalid_token_expert_id=-1,
            expert_id_payload_index=1 + len(scales),
        )
        self._expert_out = self._a2a.get_combine_payload_tensor_in_workspace(
            self.spec.tokens, self.spec.hidden, torch.bfloat16
        )
        self._pending = True

    def dispatch_recv(self) -> None:
        """Nothing: `dispatch_send` has done it."""

    def combine_send(self) -> None:
        self._out = self._a2a.combine(self._expert_out, self.spec.tokens, payload_in_workspace=True)
        self._pending = False

    def combine_recv(self) -> torch.Tensor:
        assert self._out is not None, "combine_send comes first"
        return self._out

    def received(self) -> Received:
        *payload, topk, weights = self._got
        filled = topk[..., 0] >= 0  # unfilled slots have -1 for all experts
        return Received(
            rows=dequantise(Tokens(*(part[filled] for part in payload))),
            topk_idx=local_only(topk[filled], self.rank, self.spec),
            weights=weights[filled],
            source_counts=filled.sum(1),
        )

    def apply_experts(self, factors: torch.Tensor) -> None:
        filled = self._got[-2][..., 0] >= 0
        self._expert_out[filled] = expert_sums(self.received(), factors).bfloat16()

    def poison(self) -> None:
        """This rank's workspace behind the counters and flags, and the last output."""
        start = int(self._a2a.metainfo[self._a2a._METAINFO_INDEX["PAYLOAD_DATA_OFFSET_INDEX"]])
        self._a2a.workspace[self.rank, start:].fill_(0xFF)  # NaN in every float type
        if self._out is not None:
            fill_nan(self._out)

    def wire_bytes(self, topk_idx_all: NDArray[np.int64]) -> WireBytes:
        return wire(
            topk_idx_all,
            self.spec,
            "rank",
            dispatch_row=self.spec.dispatch_row_bytes + 2 * WORD_BYTES * self.spec.topk,
            combine_row=self.spec.combine_row_bytes,
            dispatch_pair=2 * WORD_BYTES,
            combine_pair=WORD_BYTES,
        )

    def destroy(self) -> None:
        # The library keeps workspaces by size alone: a later group of that size would get ours.
        self._a2a._reset_workspace()
        del self._a2a, self._got, self._expert_out, self._out


def _open(spec: Spec, group: ProcessGroup, rank: int) -> Any:
    comm = import_module("flashinfer.comm")
    mnnvl = import_module("flashinfer.comm.mnnvl")
    return comm.MoeAlltoAll(
        comm.Mapping(spec.ep, rank, tp_size=spec.ep, moe_ep_size=spec.ep),
        max_num_tokens=spec.tokens,
        top_k=spec.topk,
        num_experts=spec.experts,
        # Room for BF16 rows, experts and weights; FP8 rows with scales take less.
        hidden_size=spec.hidden,
        mnnvl_config=mnnvl.MnnvlConfig(comm_backend=mnnvl.TorchDistBackend(group)),
    )
