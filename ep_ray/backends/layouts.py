"""What several third-party adapters share: their received rows, their bytes, their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ep_ray.a2a.routing import copies
from ep_ray.backends.base import Capabilities, Dedup, Received, Spec, WireBytes
from ep_ray.config.schema import Dtype

BOTH_DTYPES = frozenset({Dtype.fp8, Dtype.bf16})
BF16_ONLY = frozenset({Dtype.bf16})
CUDA = frozenset({"cuda"})


def take_options(
    backend: str, given: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    """`known` defaults overlaid with `given`.

    Raises:
        ValueError: A name that is not known, or a value of another type than its default.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        names = ", ".join(known) or "none"
        raise ValueError(f"`backend.options` {unknown} are unknown to {backend}; it knows {names}")
    for name, value in given.items():
        if type(value) is not type(known[name]):
            raise ValueError(
                f"`backend.options.{name}` of {backend} is {value!r},"
                f" expected a {type(known[name]).__name__} such as {known[name]!r}"
            )
    return {**known, **given}


def refuse(backend: str, can: Capabilities, spec: Spec) -> None:
    """Raises ValueError where `spec` asks for what the capabilities exclude."""
    if reasons := can.refusals(spec):
        raise ValueError(f"{backend} cannot run this: " + "; ".join(reasons))


def refuse_masked(backend: str, topk_idx: torch.Tensor) -> None:
    """Raises ValueError for a routing that masks experts, which `backend` cannot express."""
    if bool((topk_idx < 0).any()):
        raise ValueError(f"{backend} has no way to mask an expert; the routing contains -1")


def local_only(topk_idx: torch.Tensor, rank: int, spec: Spec) -> torch.Tensor:
    """Global expert numbers `[N, K]` as int64, with -1 for experts of other ranks."""
    here = topk_idx.long()
    return torch.where(here.div(spec.local_experts, rounding_mode="floor") == rank, here, -1)


def to_global(local: torch.Tensor, rank: int, spec: Spec) -> torch.Tensor:
    """Local expert numbers `[N, K]`, -1 for none, as global numbers in int64."""
    wide = local.long()
    return torch.where(wide >= 0, wide + rank * spec.local_experts, -1)


def expert_sums(got: Received, factors: torch.Tensor) -> torch.Tensor:
    """What a rank sends back: each row times the sum of its experts' factors, `[N, H]` float32.

    With router weights in `got`, each factor is weighted; without, combine does that.
    """
    factor = factors.to(got.rows.device)[got.topk_idx.clamp(min=0)]
    if got.weights is not None:
        factor = factor * got.weights
    return got.rows * torch.where(got.topk_idx >= 0, factor, 0.0).sum(1, keepdim=True)


def wire(
    topk_idx_all: NDArray[np.int64],
    spec: Spec,
    dedup: Dedup,
    *,
    dispatch_row: int,
    combine_row: int,
    dispatch_pair: int,
    combine_pair: int,
) -> WireBytes:
    """Rows times bytes, plus what every pair of ranks exchanges whatever the routing, in bytes."""
    rows = copies(topk_idx_all, spec.experts, spec.ep, dedup)
    dispatch = rows * dispatch_row + dispatch_pair
    combine = rows.T * combine_row + combine_pair
    np.fill_diagonal(dispatch, 0)
    np.fill_diagonal(combine, 0)
    return WireBytes(dispatch, combine)


def align(size: int, to: int) -> int:
    """The smallest multiple of `to` that is at least `size`."""
    return -(-size // to) * to


def fill_nan(tensor: torch.Tensor) -> None:
    """Overwrites floats with NaN and integers with -1; torch cannot fill e4m3 on all devices."""
    if tensor.dtype is torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0xFF)  # all bits set are its NaN
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
