"""Stand-ins for third-party libraries at EP1 on the CPU: their signatures and their layouts.

They check what the adapters hand over and how they read what comes back, on a machine where the
libraries cannot run; nothing here is timed. Signatures are those of the versions named in each
adapter's WRITTEN_AGAINST. Not a test module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_ray.a2a.quantise import quantise

FP8, BF16, I32, I64, F32 = (
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.float32,
)


def typed(tensor: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Asserts what a library asserts; -1 stands for any size."""
    assert tensor.dtype is dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous()
    assert len(tensor.shape) == len(shape), (tensor.shape, shape)
    assert all(n in (-1, m) for m, n in zip(tensor.shape, shape, strict=True))
    return tensor


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class DeepEpBuffer:
    """`deep_ep.Buffer`: both modes."""

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        assert explicitly_destroy
        assert (num_rdma_bytes if low_latency_mode else num_nvl_bytes) > 0
        self.live = True

    get_dispatch_config = get_combine_config = staticmethod(lambda num_ranks: Config())

    @staticmethod
    def get_low_latency_rdma_size_hint(m: int, hidden: int, num_ranks: int, experts: int) -> int:
        return m * hidden * num_ranks * experts

    def destroy(self) -> None:
        assert self.live
        self.live = False

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:
        assert num_max_dispatch_tokens_per_rank % 4 == 0
        assert num_experts is not None
        typed(x, BF16, -1, -1)
        typed(topk_idx, I64, len(x), -1)
        slots, hidden = num_max_dispatch_tokens_per_rank, x.shape[1]
        rows = torch.full((num_experts, slots, hidden), float("nan"), dtype=BF16)
        source = torch.full((num_experts, slots), -1)
        count = torch.zeros(num_experts, dtype=I32)
        for token, expert in (topk_idx >= 0).nonzero().tolist():
            e = int(topk_idx[token, expert])
            rows[e, count[e]], source[e, count[e]] = x[token], token
            count[e] += 1
        ranges = count.long().unsqueeze(1) | (7 << 32)
        handle = (source, ranges, slots, hidden, num_experts)
        received: Any = rows
        if use_fp8:
            assert round_scale
            cast = quantise(rows.float().flatten(0, 1), power_of_two=True)
            assert cast.scales is not None
            # As in the library, the last two dimensions of the scales are column-major.
            scales = cast.scales.unflatten(0, rows.shape[:2]).mT.contiguous().mT
            received = (cast.rows.unflatten(0, rows.shape[:2]), scales)
        return received, count, handle, None, self._hook(return_recv_hook)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> Any:
        source, _, slots, hidden, experts = handle
        typed(x, BF16, experts, slots, hidden)
        typed(topk_weights, F32, *topk_idx.shape)
        assert out is not None
        total = torch.zeros(typed(out, BF16, len(topk_idx), hidden).shape)
        for e, slot in (source >= 0).nonzero().tolist():
            token = source[e, slot]
            weight = topk_weights[token][topk_idx[token] == e].sum()
            total[token] += weight * x[e, slot].float()
        out.copy_(total)
        return out, None, self._hook(return_recv_hook)

    def _hook(self, asked: bool) -> Any:
        return (lambda: None) if asked else None

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> Any:
        typed(topk_idx, I64, -1, -1)
        in_rank = (topk_idx >= 0).any(1, keepdim=True)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return in_rank.sum(0), None, per_expert, in_rank, None

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
    ) -> Any:
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        sent = is_token_in_rank[:, 0].nonzero()[:, 0].flip(0)
        parts = x if isinstance(x, tuple) else (x,)
        got = tuple(part[sent] for part in parts)
        per_expert = num_tokens_per_expert.tolist()
        rows = got if isinstance(x, tuple) else got[0]
        return rows, topk_idx[sent], topk_weights[sent], per_expert, (sent, len(topk_idx)), None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> Any:
        sent, tokens = handle
        out = torch.zeros(tokens, typed(x, BF16, len(sent), -1).shape[1], dtype=BF16)
        out[sent] = x
        return out, None, None


class NixlBuffer(DeepEpBuffer):
    """`nixl_ep_cu13.Buffer`: its own opening, and a mask of silent ranks."""

    masked = 0

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: Any = None,
        comm: Any = None,
        tcp_store_group: Any = None,
        timeout_ms: int = 30_000,
    ) -> None:
        assert explicitly_destroy
        tcp_store_group.set("probe", b"1")
        assert tcp_store_group.multi_get(["probe"]) == [b"1"]
        self.live = True

    get_rdma_size_hint = staticmethod(DeepEpBuffer.get_low_latency_rdma_size_hint)

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int
    ) -> None:
        self.ranks = num_ranks

    def connect_ranks(self, remote_ranks: list[int], activate: bool = True) -> None:
        assert remote_ranks == list(range(self.ranks))

    def query_mask_buffer(self, mask_status: Tensor) -> None:
        typed(mask_status, I32, self.ranks).fill_(self.masked)

    def low_latency_dispatch(self, *args: Any, **named: Any) -> Any:
        rows, count, handle, event, hook = super().low_latency_dispatch(*args, **named)
        return rows, count, handle[:4], event, hook

    def low_latency_combine(self, *args: Any, **named: Any) -> Any:
        handle = (*args[3], len(args[3][0]))
        return super().low_latency_combine(*args[:3], handle, **named)


class ElasticBuffer(DeepEpBuffer):
    """`deep_ep.ElasticBuffer`."""

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        assert explicitly_destroy
        self.most, self.live = num_max_tokens_per_rank, True

    def dispatch(  # type: ignore[override]
        self,
        x: Any,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        do_cpu_sync: bool | None = None,
    ) -> Any:
        assert topk_idx is not None
        assert topk_weights is not None
        sent = (topk_idx >= 0).any(1).nonzero()[:, 0].flip(0)
        padding = torch.zeros(0 if do_cpu_sync else self.most - len(sent), dtype=I64)
        at = torch.cat((sent, padding))
        parts = x if isinstance(x, tuple) else (x,)
        got = tuple(part[at] for part in parts)
        through = torch.tensor([len(sent)], dtype=I32)
        handle = module("handle", psum_num_recv_tokens_per_scaleup_rank=through, at=at, sent=sent)
        rows = got if isinstance(x, tuple) else got[0]
        return rows, topk_idx[at], topk_weights[at], handle, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> Any:
        typed(x, BF16, len(handle.at), -1)
        return super().combine(x[: len(handle.sent)], (handle.sent, self.most))


class MoeAlltoAll:
    """`flashinfer.comm.MoeAlltoAll`: `[R, M, *]` in one workspace, dispatch and combine in turn."""

    START = 256
    _METAINFO_INDEX: ClassVar = {"PAYLOAD_DATA_OFFSET_INDEX": 8}

    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
    ) -> None:
        assert hidden_size is not None
        assert mnnvl_config.comm_backend is not None
        row = 4 * hidden_size + 8 * top_k
        self.workspace = torch.zeros(1, self.START + max_num_tokens * row, dtype=torch.uint8)
        self.metainfo = torch.zeros(9, dtype=I64)
        self.metainfo[8] = self.START
        self.phase = "idle"

    def dispatch(
        self,
        token_selected_experts: Tensor,
        input_payloads: list[Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
    ) -> list[Tensor]:
        assert self.phase == "idle", "dispatch called twice without combine"
        assert len(input_payloads) <= 4
        typed(token_selected_experts, I32, -1, -1)
        self.phase, at, received = "dispatched", self.START, []
        for payload in input_payloads:
            size = payload.nbytes
            region = self.workspace[0, at : at + size].view(payload.dtype).view(payload.shape)
            region.view(torch.uint8).copy_(typed(payload, payload.dtype, -1, -1).view(torch.uint8))
            received.append(region.unsqueeze(0))
            at += size
        self.at, self.tokens = at, len(token_selected_experts)
        return received

    def get_combine_payload_tensor_in_workspace(
        self, runtime_max_tokens_per_rank: int, hidden_size: int, dtype: torch.dtype
    ) -> Tensor:
        assert self.phase == "dispatched"
        end = self.at + self.tokens * hidden_size * dtype.itemsize
        return self.workspace[0, self.at : end].view(dtype).view(1, self.tokens, hidden_size)

    def combine(
        self, payload: Tensor, runtime_max_tokens_per_rank: int, payload_in_workspace: bool = False
    ) -> Tensor:
        assert self.phase == "dispatched", "combine called before successful dispatch"
        assert payload_in_workspace
        self.phase = "idle"
        return payload[0].clone()

    def _reset_workspace(self) -> None:
        self.phase = "deleted"


def flashinfer_modules() -> dict[str, ModuleType]:
    mapping = lambda world_size, rank, gpus_per_node=8, *, tp_size, moe_ep_size: None  # noqa: E731
    mnnvl = module(
        "mnnvl",
        MnnvlConfig=lambda comm_backend: module("config", comm_backend=comm_backend),
        TorchDistBackend=lambda group: group,
    )
    comm = module("comm", MoeAlltoAll=MoeAlltoAll, Mapping=mapping)
    return {"flashinfer.comm": comm, "flashinfer.comm.mnnvl": mnnvl}


class NcclHandle:
    """`nccl.ep.Handle`, rank-major and low latency."""

    def __init__(self, config: Any, topk: Any) -> None:
        self.config, self.topk, self.staged = config, topk, False

    def update(self, topk_idx: Any, *, layout_info: Any = None, stream: Any) -> None:
        typed(topk_idx.tensor, I64, -1, -1)
        self.topk = topk_idx

    def dispatch(
        self,
        inputs: Any,
        outputs: Any,
        *,
        layout_info: Any = None,
        config: Any = None,
        stream: Any,
    ) -> None:
        rows, topk = inputs.tokens.tensor, self.topk.tensor
        forwarded = config.quantization_recipe.name == "FWD"
        assert (inputs.scales is not None) == (outputs.scales is not None) == forwarded
        assert rows.nbytes // len(rows) + (rows.shape[1] // 32) * forwarded <= (
            self.config.max_token_bytes
        )
        assert layout_info.recv_topk_idx_kind.name == "GLOBAL"
        self.sent = (topk >= 0).any(1).nonzero()[:, 0].flip(0)
        count = len(self.sent)
        tokens, hidden = rows.shape
        received = typed(outputs.tokens.tensor, rows.dtype, 1, tokens, hidden)
        received[0, :count] = rows[self.sent]
        if forwarded:
            outputs.scales.tensor[0, :count] = inputs.scales.tensor[self.sent]
        received_topk = typed(outputs.topk_idx.tensor, I32, 1, *topk.shape)
        received_topk.fill_(-1)
        received_topk[0, :count] = topk[self.sent].int()
        weights = typed(inputs.topk_weights.tensor, F32, *topk.shape)
        outputs.topk_weights.tensor[0, :count] = weights[self.sent]
        typed(layout_info.src_rank_counters.tensor, I32, 1).fill_(count)
        self.staged = bool(config.send_only)

    def combine(self, inputs: Any, outputs: Any, *, config: Any = None, stream: Any) -> None:
        out = outputs.tokens.tensor
        sums = typed(inputs.tokens.tensor, BF16, 1, *out.shape)
        out.zero_()
        out[self.sent] = sums[0, : len(self.sent)]
        self.staged = bool(config.send_only)

    def complete(self, *, config: int = 0, stream: Any) -> None:
        assert self.staged
        self.staged = False

    def destroy(self) -> None:
        assert not self.staged


class NcclGroup:
    """`nccl.ep.Group`."""

    @classmethod
    def create(cls, comm: Any, config: Any) -> NcclGroup:
        made = cls()
        made.config = config
        return made

    config: Any = None

    def create_handle(self, layout: Any, topk_idx: Any, *, stream: Any) -> NcclHandle:
        assert layout.name == "RANK_MAJOR"
        return NcclHandle(self.config, topk_idx)

    def destroy(self) -> None:
        self.config = None


@dataclass(kw_only=True)
class NcclStruct:
    tokens: Any = None
    topk_weights: Any = None
    scales: Any = None
    topk_idx: Any = None
    src_rank_counters: Any = None
    recv_topk_idx_kind: Any = None
    send_only: int = 0
    quantization_recipe: Any = None
    algorithm: Any = None
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    timeout_ns: int = 0
    num_topk: int = 0
    extra: Any = field(default=None, repr=False)


def nccl_modules() -> dict[str, ModuleType]:
    names = "GroupConfig DispatchInputs DispatchOutputs DispatchConfig LayoutInfo CombineInputs"
    structs = dict.fromkeys((*names.split(), "CombineOutputs", "CombineConfig"), NcclStruct)
    ep = module(
        "nccl.ep",
        Algorithm=IntEnum("Algorithm", "LOW_LATENCY HIGH_THROUGHPUT", start=0),
        Layout=IntEnum("Layout", "UNSET EXPERT_MAJOR RANK_MAJOR FLAT", start=0),
        ExpertIdKind=IntEnum("ExpertIdKind", "AUTO LOCAL GLOBAL", start=0),
        DispatchQuantizationRecipe=IntEnum("Recipe", "NONE FWD DS_FP8E3M4", start=0),
        Tensor=lambda tensor: module("descriptor", tensor=tensor),
        Group=NcclGroup,
        **structs,
    )
    comm = module("comm", destroy=lambda: None)
    interop = module("interop", get_nccl_comm_from_group=lambda group: comm)
    return {"nccl.ep": ep, "nccl.ep.interop.torch": interop}


class P2PAllToAll:
    """`pplx_garden.kernels.p2p_all_to_all.P2PAllToAll`: packed by expert."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        num_experts: int,
        expert_padding: int,
        hidden_dim: int,
        hidden_dim_scale: int | None,
        in_dtype: torch.dtype,
        out_dtype: torch.dtype,
        scale_dtype: torch.dtype | None,
        num_experts_per_token: int,
        nets_per_gpu: int,
        max_private_tokens: int | None,
        device: torch.device,
        dp_group: Any,
        node_group: Any,
        global_group: Any,
    ) -> None:
        assert expert_padding == 1
        assert (hidden_dim_scale is None) == (scale_dtype is None)
        assert global_group.all_gather_object(1) == [1] * global_group.size
        global_group.barrier()
        self.experts, self.in_dtype = num_experts, in_dtype

    def dispatch(
        self,
        out_expert_num_tokens: Tensor,
        out_expert_x: Tensor,
        out_expert_x_scale: Tensor | None,
        dp_x: Tensor,
        dp_x_scale: Tensor | None,
        indices: Tensor,
        weights: Tensor,
        bound_m: Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        typed(indices, torch.uint32, len(dp_x), -1)
        typed(weights, F32, *indices.shape)
        if do_send:
            experts = indices.long()
            order = torch.argsort(experts.flatten(), stable=True)
            self.token, self.choice = order // experts.shape[1], order % experts.shape[1]
        if do_recv:
            count = len(self.token)
            typed(out_expert_x, self.in_dtype, -1, dp_x.shape[1])
            out_expert_x[:count] = dp_x[self.token]
            if dp_x_scale is not None:
                assert out_expert_x_scale is not None
                out_expert_x_scale[:count] = dp_x_scale[self.token]
            per_expert = torch.bincount(indices.long().flatten(), minlength=self.experts)
            typed(out_expert_num_tokens, I32, self.experts).copy_(per_expert)

    def combine(
        self,
        out_tokens: Tensor,
        indices: Tensor,
        weights: Tensor,
        expert_y: Tensor,
        bound_m: Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
        accumulate: bool = False,
    ) -> None:
        if do_recv:
            count = len(self.token)
            rows = weights[self.token, self.choice].unsqueeze(1) * expert_y[:count].float()
            total = torch.zeros(typed(out_tokens, BF16, -1, -1).shape)
            out_tokens.copy_(total.index_add_(0, self.token, rows))

    def destroy(self) -> None:
        self.token = self.choice = None


def modules() -> dict[str, ModuleType]:
    """Everything that the adapters import, by module name."""
    deep_ep = module("deep_ep", Buffer=DeepEpBuffer, ElasticBuffer=ElasticBuffer, topk_idx_t=I64)
    p2p = module("p2p_all_to_all", P2PAllToAll=P2PAllToAll)
    return {
        "deep_ep": deep_ep,
        "nixl_ep_cu13": module("nixl_ep_cu13", Buffer=NixlBuffer, topk_idx_t=I64),
        "pplx_garden.kernels.p2p_all_to_all": p2p,
        **flashinfer_modules(),
        **nccl_modules(),
    }
