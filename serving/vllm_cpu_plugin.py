"""vLLM plugin: what expert parallelism lacks on the CPU build.

vLLM 0.30.0's `CpuCommunicator` has neither `all_gatherv` nor `reduce_scatterv`, and the only
all-to-all manager on the CPU is built on them: the first MoE forward of a data-parallel group
ends in `NotImplementedError`. This adds both over `torch.distributed`.

Its expert kernel gets global expert ids and ignores the map from global to local ones: with
expert parallelism it reads outside the rank's own weights, and sooner or later the worker dies
of a segmentation fault. This maps the ids, and gives experts of other ranks the weight zero.

Ranks hold different numbers of rows, and gloo gathers equal shapes only: each rank pads to the
longest, all gather, and the padding is cut off. vLLM loads the plugin in every process of every
installation, so it does nothing where it is not needed.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Entry point of the group `vllm.general_plugins`. Safe to call more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for name, method in (("all_gatherv", all_gatherv), ("reduce_scatterv", reduce_scatterv)):
        inherited = getattr(DeviceCommunicatorBase, name, None)
        if getattr(CpuCommunicator, name, None) is inherited:
            setattr(CpuCommunicator, name, method)
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if not _reads(CPUUnquantizedExperts.apply, "expert_map"):
        CPUUnquantizedExperts.apply = with_local_experts(CPUUnquantizedExperts.apply)


def _reads(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function ever looks at one of its arguments."""
    loads = (i for i in dis.get_instructions(function) if i.opname.startswith("LOAD_"))
    return any(argument == i.argval or argument in _names(i.argval) for i in loads)


def _names(value: object) -> tuple[object, ...]:
    # Python 3.13 loads two variables in one instruction and names both.
    return value if isinstance(value, tuple) else ()


def with_local_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """Wraps an experts' `apply` so that its kernel sees this rank's own experts only.

    The map holds -1 for experts of other ranks: those (token, expert) pairs get a valid id and
    the weight zero. The sum over ranks that follows adds their rows.
    """

    @functools.wraps(apply)
    def mapped(self: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        call = dict(zip(_APPLY_ARGUMENTS, args, strict=False)) | kwargs
        expert_map = call["expert_map"]
        if expert_map is None:
            return apply(self, output, **call)
        ids = call["topk_ids"]
        local = expert_map[ids.long()]
        elsewhere = local < 0
        call["topk_ids"] = local.masked_fill(elsewhere, 0).to(ids.dtype).contiguous()
        call["topk_weights"] = call["topk_weights"].masked_fill(elsewhere, 0.0)
        apply(self, output, **call)
        if call["apply_router_weight_on_input"]:  # then the kernel ignores the weights
            output.masked_fill_(elsewhere.all(dim=1, keepdim=True), 0.0)
        return None

    return mapped


_APPLY_ARGUMENTS = (
    "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts",
    "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta",
    "apply_router_weight_on_input",
)  # fmt: skip


def all_gatherv(
    self: Any,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Gathers rows of every rank, in rank order.

    Args:
        self: A communicator: `world_size`, `rank_in_group` and `device_group`.
        input_: [sizes[rank], ...], or a list of such tensors.
        dim: Only 0, as in vLLM's other communicators.
        sizes: Rows per rank; None means that all have as many as this one.

    Returns:
        [sum(sizes), ...], or a list of such tensors.
    """
    if dim != 0:
        raise NotImplementedError(f"all_gatherv over dimension {dim}; only 0 is supported")
    if isinstance(input_, list):
        return [_gather_rows(self, tensor, sizes) for tensor in input_]
    return _gather_rows(self, input_, sizes)


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Sums over ranks and leaves each rank its own rows.

    The sum is an all-reduce of which each rank keeps its part: gloo has no reduce-scatter of
    unequal parts, and on the CPU build function counts, not speed.

    Args:
        self: A communicator: `world_size`, `rank_in_group` and `device_group`.
        input_: [..., sum(sizes), ...], with the split dimension at `dim`.
        dim: The dimension that is split.
        sizes: Rows per rank; None means equal parts.

    Returns:
        [..., sizes[rank], ...], contiguous.
    """
    import torch

    total = input_.clone(memory_format=torch.contiguous_format)  # the caller keeps its input
    rows = total.shape[dim]
    parts = [rows // self.world_size] * self.world_size if sizes is None else sizes
    if len(parts) != self.world_size or sum(parts) != rows:
        raise ValueError(f"reduce_scatterv: {rows} rows do not split into {parts}")
    torch.distributed.all_reduce(total, group=self.device_group)
    first = sum(parts[: self.rank_in_group])
    return total.narrow(dim, first, parts[self.rank_in_group]).contiguous()


def _gather_rows(self: Any, rows: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    import torch

    counts = [rows.shape[0]] * self.world_size if sizes is None else sizes
    rank = self.rank_in_group
    if len(counts) != self.world_size or counts[rank] != rows.shape[0]:
        raise ValueError(f"all_gatherv: rank {rank} has {rows.shape[0]} rows; sizes say {counts}")
    longest = max(counts)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = rows.new_empty((self.world_size * longest, *rows.shape[1:]))
    torch.distributed.all_gather_into_tensor(gathered, padded, group=self.device_group)
    if min(counts) == longest:
        return gathered
    blocks = gathered.view(self.world_size, longest, *rows.shape[1:])
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])
