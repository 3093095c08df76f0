"""The routings that a trial goes through in turn: drawn or read, then masked and shortened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ep_ray.a2a.procedure import Procedure
from ep_ray.a2a.routing import Routing, draw, draw_weights
from ep_ray.backends.base import Spec
from ep_ray.config.schema import RoutingKind

POOL_TOKENS = 1 << 16
"""Tokens per rank over all routings of the pool, which has 4 to 32 of them."""
CHECKED = 2
"""Routings of a pool that the correctness check runs: one would not show what is left over."""
_MASKS, _LENGTHS = 1, 2  # draws that must not depend on each other


def draw_pool(
    spec: Spec, procedure: Procedure, rank: int, table: NDArray[np.int64] | None = None
) -> list[Routing]:
    """The routings that iterations of `rank` go through in turn.

    Args:
        table: `[N, K]` real choices, for `file` routing.

    Raises:
        ValueError: `file` routing without a table, or the routing cannot be drawn.
    """
    size = min(32, max(4, POOL_TOKENS // spec.tokens))
    return [_one(spec, procedure, rank, iteration, table) for iteration in range(size)]


def _one(
    spec: Spec, procedure: Procedure, rank: int, iteration: int, table: NDArray[np.int64] | None
) -> Routing:
    group, place = divmod(rank, procedure.local_tp)
    batch = _batch(spec, procedure, group, iteration, table)
    tokens = _length(spec, procedure, rank, iteration)
    mine = slice(place, place + tokens * procedure.local_tp, procedure.local_tp)
    routing = Routing(batch.topk_idx[mine], batch.weights[mine])
    return _mask(routing, procedure, rank, iteration)


def _batch(
    spec: Spec, procedure: Procedure, group: int, iteration: int, table: NDArray[np.int64] | None
) -> Routing:
    """What the ranks of a group send together: every n-th token each, with n ranks."""
    tokens = spec.tokens * procedure.local_tp
    if procedure.routing is RoutingKind.file:
        groups = spec.ep // procedure.local_tp
        rng = np.random.default_rng([procedure.seed, group, iteration])
        return _read(rng, (iteration * groups + group) * tokens, tokens, spec.topk, table)
    return draw(
        procedure.routing,
        seed=procedure.seed,
        rank=group,
        iteration=iteration,
        tokens=tokens,
        experts=spec.experts,
        topk=spec.topk,
        ep=spec.ep,
        exponent=procedure.zipf_exponent,
    )


def _length(spec: Spec, procedure: Procedure, rank: int, iteration: int) -> int:
    """Tokens that `rank` sends in this routing."""
    asked = procedure.tokens_per_rank
    if asked == "uniform":
        return spec.tokens
    if asked == "ragged":
        rng = np.random.default_rng([procedure.seed, rank, iteration, _LENGTHS])
        return int(rng.integers(0, spec.tokens + 1))
    return int(asked[rank])


def _mask(routing: Routing, procedure: Procedure, rank: int, iteration: int) -> Routing:
    if not procedure.masked_share:
        return routing
    rng = np.random.default_rng([procedure.seed, rank, iteration, _MASKS])
    masked = torch.from_numpy(rng.random(routing.topk_idx.shape) < procedure.masked_share)
    return Routing(
        routing.topk_idx.masked_fill(masked, -1), routing.weights.masked_fill(masked, 0.0)
    )


def _read(
    rng: np.random.Generator, first: int, tokens: int, topk: int, table: NDArray[np.int64] | None
) -> Routing:
    """Rows of the table from `first` on: groups, then iterations, take their own, and wrap."""
    if table is None:
        raise ValueError("routing `file` needs `workload.routing_file`")
    rows = (first + np.arange(tokens)) % len(table)
    idx = torch.from_numpy(table[rows].astype(np.int64))
    return Routing(idx, draw_weights(rng, tokens, topk).masked_fill(idx < 0, 0.0))


@dataclass(frozen=True)
class Gathered:
    """One routing of all ranks: `topk_idx` int64 and `weights` float32, both `[R, T, K]`.

    Tokens that a rank does not send are masked. Nobody may write to them.
    """

    topk_idx: NDArray[np.int64]
    weights: NDArray[np.float32]


def gather(
    pool: Sequence[Routing], tokens: int, group: ProcessGroup, device: torch.device
) -> tuple[NDArray[np.int64], list[Gathered]]:
    """The pool of all ranks; collective, in one exchange, for every trial waits for it.

    Returns:
        Experts of the whole pool, `[P, R, T, K]`, and its first `CHECKED` routings with weights.
    """
    full = [full_length(routing, tokens) for routing in pool]
    weights = [routing.weights.view(torch.int32) for routing in full[:CHECKED]]
    mine = torch.stack([*(routing.topk_idx.to(torch.int32) for routing in full), *weights])
    mine = mine.to(device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    found = torch.stack(parts, dim=1).cpu().numpy()
    topk_idx = found[: len(full)].astype(np.int64)
    topk_idx.flags.writeable = False
    checked = found[len(full) :].view(np.float32)
    return topk_idx, [Gathered(*both) for both in zip(topk_idx, checked, strict=False)]


def full_length(routing: Routing, tokens: int) -> Routing:
    """The routing with `tokens` rows; those that are not there are masked."""
    missing = tokens - len(routing.topk_idx)
    if not missing:
        return routing
    pad = torch.nn.functional.pad
    return Routing(
        pad(routing.topk_idx, (0, 0, 0, missing), value=-1),
        pad(routing.weights, (0, 0, 0, missing)),
    )


def on_device(pool: list[Routing], device: torch.device) -> list[Routing]:
    """The pool where iterations read it, so that none of them waits for the host."""
    return [Routing(r.topk_idx.to(device), r.weights.to(device)) for r in pool]
