"""Samples of one or more ranks and the figures made of them; pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Samples:
    """Timings as columns of equal length.

    Attributes:
        op: `dispatch`, `combine`, `pair`, or `empty` for the floor.
        role: `cold`, `warmup`, `measured` or `floor`.
        rank: int32.
        iteration: int32, counted from 0 within (op, role).
        duration_ns: int64.
    """

    op: NDArray[np.str_]
    role: NDArray[np.str_]
    rank: NDArray[np.int32]
    iteration: NDArray[np.int32]
    duration_ns: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.duration_ns)

    def of(self, op: str, role: str = "measured") -> Samples:
        """The samples of one operation and role."""
        chosen = (self.op == op) & (self.role == role)
        return Samples(*(column[chosen] for column in self.columns()))

    def columns(self) -> tuple[NDArray[Any], ...]:
        """The columns in the order of the attributes."""
        return self.op, self.role, self.rank, self.iteration, self.duration_ns


def series(op: str, role: str, rank: int, durations_ns: Sequence[int]) -> Samples:
    """Consecutive timings of one rank, operation and role."""
    n = len(durations_ns)
    return Samples(
        np.full(n, op),
        np.full(n, role),
        np.full(n, rank, np.int32),
        np.arange(n, dtype=np.int32),
        np.asarray(durations_ns, np.int64),
    )


def concat(parts: Sequence[Samples]) -> Samples:
    """All samples of `parts`, which may be empty."""
    if not parts:
        return series("", "", 0, [])
    tables = [part.columns() for part in parts]
    return Samples(*(np.concatenate(columns) for columns in zip(*tables, strict=True)))


@dataclass(frozen=True)
class Percentiles:
    """Of a pool of samples, linear interpolation."""

    p50_ns: float
    p95_ns: float
    p99_ns: float


def slowest_rank_ns(samples: Samples, op: str) -> NDArray[np.int64]:
    """For each measured iteration the largest duration over ranks.

    Raises:
        ValueError: An iteration lacks a rank or has it twice, or there is no sample.
    """
    chosen = samples.of(op)
    ranks, row = np.unique(chosen.rank, return_inverse=True)
    iterations, column = np.unique(chosen.iteration, return_inverse=True)
    counts = np.zeros((len(ranks), len(iterations)), np.int64)
    np.add.at(counts, (row, column), 1)
    if not len(chosen) or (counts != 1).any():
        raise ValueError(_not_a_grid(op, ranks, iterations, counts))
    grid = np.empty(counts.shape, np.int64)
    grid[row, column] = chosen.duration_ns
    slowest: NDArray[np.int64] = grid.max(axis=0)
    return slowest


def _not_a_grid(
    op: str, ranks: NDArray[np.int32], iterations: NDArray[np.int32], counts: NDArray[np.int64]
) -> str:
    found = f"{op}: {counts.sum()} measured samples of {len(ranks)} ranks"
    if not counts.size:
        return f"{found}, wanted one of every rank in every iteration"
    r, i = np.argwhere(counts != 1)[0]
    return (
        f"{found}: iteration {iterations[i]} has {counts[r, i]} samples of rank {ranks[r]},"
        " wanted one"
    )


def headline_ns(samples: Samples, op: str) -> float:
    """Median over iterations of the maximum over ranks.

    Not the maximum of per-rank medians, which is lower: ranks take turns in being last.
    """
    return float(np.median(slowest_rank_ns(samples, op)))


def pooled(samples: Samples, op: str) -> Percentiles:
    """Percentiles over all ranks and measured iterations, as published tables give them."""
    return Percentiles(*map(float, np.percentile(samples.of(op).duration_ns, [50, 95, 99])))


def rank_medians_ns(samples: Samples, op: str) -> dict[int, float]:
    """Median of the measured iterations of each rank."""
    chosen = samples.of(op)
    return {
        int(rank): float(np.median(chosen.duration_ns[chosen.rank == rank]))
        for rank in np.unique(chosen.rank)
    }
