"""How the headline of an operation is made of its samples: the project's way and others'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ep_ray.a2a.stats import Samples, headline_ns
from ep_ray.config.schema import CompatKind


@dataclass(frozen=True)
class Statistic:
    """A headline: what it is, in words, and how it is computed (samples, op) -> ns."""

    words: str
    of: Callable[[Samples, str], float]


def _pooled_median(samples: Samples, op: str) -> float:
    return float(np.median(samples.of(op).duration_ns))


def _mean(samples: Samples, op: str) -> float:
    return float(np.mean(samples.of(op).duration_ns))


def _median_of_rank_means(samples: Samples, op: str) -> float:
    chosen = samples.of(op)
    means = [chosen.duration_ns[chosen.iteration == i].mean() for i in np.unique(chosen.iteration)]
    return float(np.median(means))


NEUTRAL = Statistic("maximum over ranks, then median over iterations", headline_ns)
_POOLED = Statistic("median over all ranks and iterations", _pooled_median)
BY_COMPAT: dict[CompatKind, Statistic] = {
    CompatKind.pplx_garden: _POOLED,
    CompatKind.uccl: _POOLED,
    CompatKind.deepep: Statistic("mean over all ranks and iterations", _mean),
    CompatKind.nccl_tests: Statistic(
        "host time of a loop over its operations, mean over ranks, median over loops",
        _median_of_rank_means,
    ),
}


def statistic_in_words(words: str | None) -> Statistic:
    """The statistic that a row names; the project's own where it names none."""
    known = {found.words: found for found in BY_COMPAT.values()}
    return known.get(words or "", NEUTRAL)


def statistic(compat: CompatKind | None) -> Statistic:
    """The statistic of a way of measuring; None is the project's own."""
    return NEUTRAL if compat is None else BY_COMPAT[compat]
