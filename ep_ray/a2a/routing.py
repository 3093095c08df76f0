"""Synthetic routers: which experts each token goes to, drawn from (seed, rank, iteration).

Every draw has a generator of its own, so that any process can draw any rank's routing and
neither global random state nor order matters.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ep_ray.backends.base import Dedup
from ep_ray.config.schema import RoutingKind

HOT_RANK = 0
"""The rank that receives everything under `one_hot` routing."""


@dataclass(frozen=True)
class Routing:
    """`topk_idx` int64 `[t, K]`, distinct in a row; `weights` float32 `[t, K]`, rows sum to 1.

    t is T, or fewer where ranks differ; a masked choice is expert -1 with weight 0.
    """

    topk_idx: torch.Tensor
    weights: torch.Tensor


def draw(
    kind: RoutingKind,
    *,
    seed: int,
    rank: int,
    iteration: int,
    tokens: int,
    experts: int,
    topk: int,
    ep: int,
    exponent: float = 1.2,
) -> Routing:
    """Draws the routing of one rank and iteration.

    Args:
        kind: `uniform`: random distinct experts. `zipf`: expert popularity falls as
            1 / position ** exponent, in an order fixed by `seed`. `balanced`: strided round
            robin, every expert equally often. `one_hot`: all on the experts of rank 0.
        exponent: Only read by `zipf`.

    Raises:
        ValueError: `one_hot` with fewer than `topk` experts per rank, or `file`, which is read.
    """
    if kind is RoutingKind.file:
        raise ValueError("routing `file` is read from `workload.routing_file`, not drawn")
    rng = np.random.default_rng([seed, rank, iteration])
    if kind is RoutingKind.balanced:
        idx = _balanced(rank * tokens + iteration, tokens, experts, topk)
    elif kind is RoutingKind.one_hot:
        idx = _one_hot(rng, tokens, experts // ep, topk)
    else:
        popularity = _popularity(experts, seed, exponent if kind is RoutingKind.zipf else 0.0)
        idx = _distinct(rng, tokens, popularity, topk)
    return Routing(torch.from_numpy(idx), draw_weights(rng, tokens, topk))


def draw_weights(rng: np.random.Generator, tokens: int, topk: int) -> torch.Tensor:
    """Router weights float32 `[T, K]` whose rows sum to 1."""
    share = rng.uniform(0.1, 1.0, (tokens, topk))
    return torch.from_numpy((share / share.sum(axis=1, keepdims=True)).astype(np.float32))


@lru_cache(maxsize=8)
def _popularity(experts: int, seed: int, exponent: float) -> NDArray[np.float64]:
    # Shuffled, because popular experts need not sit side by side on rank 0.
    position = np.random.default_rng(seed).permutation(experts) + 1
    return position.astype(np.float64) ** -exponent


def _distinct(
    rng: np.random.Generator, tokens: int, popularity: NDArray[np.float64], topk: int
) -> NDArray[np.int64]:
    # The K smallest of independent exponentials with rate p are a draw without replacement
    # in proportion to p (Efraimidis and Spirakis, 2006).
    keys = rng.standard_exponential((tokens, len(popularity)), dtype=np.float32)
    keys /= popularity.astype(np.float32)
    return np.argpartition(keys, topk - 1, axis=1)[:, :topk].astype(np.int64)


def _balanced(first: int, tokens: int, experts: int, topk: int) -> NDArray[np.int64]:
    token = first + np.arange(tokens, dtype=np.int64)[:, None]
    stride = np.arange(topk, dtype=np.int64) * (experts // topk)
    return cast(NDArray[np.int64], (token + stride) % experts)


def _one_hot(
    rng: np.random.Generator, tokens: int, local_experts: int, topk: int
) -> NDArray[np.int64]:
    if local_experts < topk:
        raise ValueError(
            f"one_hot routing puts all {topk} experts of a token on one rank, which holds only"
            f" {local_experts}; lower `workload.topk` or `workload.ep`, or raise `workload.experts`"
        )
    local = _distinct(rng, tokens, np.ones(local_experts), topk)
    return local + HOT_RANK * local_experts


def copies(
    topk_idx_all: NDArray[np.int64], experts: int, ranks: int, dedup: Dedup
) -> NDArray[np.int64]:
    """Counts the rows that each source sends to each destination.

    Args:
        topk_idx_all: `[R, T, K]`, -1 for a masked expert.
        experts: Experts over all `ranks` destinations, which hold equal contiguous shares.
        ranks: Destinations; R for ranks, fewer when destinations are nodes.
        dedup: `none` counts (token, expert); otherwise (token, destination).

    Returns:
        `[R, ranks]` int64, a rank's own share on the diagonal; read-only where `topk_idx_all` is,
        which is then counted once: bound, bytes and imbalance all ask for it.
    """
    if topk_idx_all.flags.writeable:
        return _copies(topk_idx_all, experts, ranks, dedup)
    key = (experts, ranks, dedup)
    owner, counts = _counted.get(key, (None, None))
    if owner is None or counts is None or owner() is not topk_idx_all:
        counts = _copies(topk_idx_all, experts, ranks, dedup)
        counts.flags.writeable = False
        _counted[key] = (weakref.ref(topk_idx_all), counts)
    return counts


_counted: dict[tuple[int, int, Dedup], tuple[weakref.ref[Any], NDArray[np.int64]]] = {}
"""What was counted last, and of which array."""


def _copies(
    topk_idx_all: NDArray[np.int64], experts: int, ranks: int, dedup: Dedup
) -> NDArray[np.int64]:
    sources, width = len(topk_idx_all), ranks + 1  # the last column collects what has no copy
    # Choices come first, in small integers: numpy then compares all tokens at once.
    chosen = np.moveaxis(topk_idx_all, 2, 0).astype(np.int32, order="C")
    destination = np.where(chosen < 0, ranks, chosen // (experts // ranks)).astype(np.int32)
    if dedup != "none":
        again = [(destination[:k] == destination[k]).any(axis=0) for k in range(len(destination))]
        destination[np.stack(again)] = ranks
    cell = np.arange(sources)[:, None] * width + destination
    counts = np.bincount(cell.ravel(), minlength=sources * width).reshape(sources, width)
    return counts[:, :ranks].astype(np.int64)


def max_over_mean(rows: NDArray[np.int64]) -> float:
    """Imbalance of a `[R, R]` row matrix: most rows received over the mean; 1.0 for none."""
    received = rows.sum(axis=0)
    return float(received.max() / received.mean()) if received.any() else 1.0
