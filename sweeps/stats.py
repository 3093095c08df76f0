"""Statistics of samples and of repeats: pure functions over numbers.

The definitions are the project's own and are printed with every report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = Sequence[float] | Sequence[int] | npt.NDArray[np.int64] | npt.NDArray[np.float64]

_RESAMPLES = 10_000


def percentile(values: Numbers, q: float) -> float | None:
    """The q-th percentile (0 to 100) with linear interpolation; None without values."""
    if len(values) == 0:
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def median(values: Numbers) -> float | None:
    """The median; None without values."""
    return percentile(values, 50)


def headline(
    rank: npt.NDArray[np.int64],
    iteration: npt.NDArray[np.int64],
    duration_ns: npt.NDArray[np.int64],
) -> float | None:
    """Maximum over ranks of each iteration, then the median over iterations, in ns.

    Args are parallel arrays of one operation's measured samples, in any order.

    Raises:
        ValueError: An iteration lacks a rank, or a rank timed one twice.
    """
    if len(duration_ns) == 0:
        return None
    ranks, row = np.unique(rank, return_inverse=True)
    iterations, column = np.unique(iteration, return_inverse=True)
    counts = np.zeros((len(ranks), len(iterations)), dtype=np.int64)
    np.add.at(counts, (row, column), 1)
    if (counts != 1).any():
        r, i = np.argwhere(counts != 1)[0]
        raise ValueError(
            f"iteration {iterations[i]} has {counts[r, i]} samples of rank {ranks[r]}, wanted one"
        )
    grid = np.zeros(counts.shape, dtype=np.int64)
    grid[row, column] = duration_ns
    return float(np.median(grid.max(axis=0)))


@dataclass(frozen=True)
class Ratio:
    """A ratio of two arms: median of the ratios of paired repeats.

    Attributes:
        value: The median.
        low: Lower end of the bootstrap 95 % interval; None with one repeat.
        high: Upper end of it.
        repeats: Pairs behind it.
    """

    value: float
    low: float | None
    high: float | None
    repeats: int

    @property
    def excludes_one(self) -> bool:
        """Whether there is an interval and 1 lies outside it."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def paired_ratio(a: Mapping[int, float], b: Mapping[int, float], seed: int = 0) -> Ratio | None:
    """Ratio a / b over the repeats that both have; None when there is none.

    `a` and `b` map a repeat's number to its value. With two pairs or more the interval is the
    percentile bootstrap of the median: pairs are drawn with replacement by a seeded generator.
    """
    ratios = np.array([a[r] / b[r] for r in sorted(a.keys() & b.keys()) if b[r] != 0])
    if len(ratios) == 0:
        return None
    value = float(np.median(ratios))
    if len(ratios) == 1:
        return Ratio(value, None, None, 1)
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(ratios), size=(_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5])
    return Ratio(value, float(low), float(high), len(ratios))


def coverage_limit(repeats: int) -> float:
    """Largest coverage that an interval of a median can have with so few repeats.

    The interval never leaves the range of the observed ratios, and that range misses the true
    median when all of them fall on one side of it: with probability 2 x 0.5^repeats.
    """
    return 1.0 - 2.0 * math.pow(0.5, repeats)
