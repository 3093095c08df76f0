"""vLLM plugin: the two collectives that expert parallelism needs on the CPU build.

vLLM 0.30.0's `CpuCommunicator` has neither `all_gatherv` nor `reduce_scatterv`, and the only
all-to-all manager on the CPU is built on them: the first MoE forward of a data-parallel group
ends in `NotImplementedError`. This adds both over `torch.distributed`.

Ranks hold different numbers of rows, and gloo gathers equal shapes only: each rank pads to the
longest, all gather, and the padding is cut off. vLLM loads the plugin in every process of every
installation, so it does nothing where it is not needed.
"""

from __future__ import annotations

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
