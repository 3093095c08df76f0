"""Statistics of repeats: pure functions over numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = Sequence[float] | Sequence[int] | npt.NDArray[np.int64] | npt.NDArray[np.float64]

_RESAMPLES = 10_000
_MOST_PAIRS_TRIED_OUT = 12


def median(values: Numbers) -> float | None:
    """The median; None without values."""
    return float(np.median(values)) if len(values) else None


@dataclass(frozen=True)
class Ratio:
    """A ratio of two arms: median of the ratios of paired repeats.

    Attributes:
        value: The median.
        low: Lower end of the bootstrap 95 % interval; None with one repeat.
        high: Upper end of it.
        repeats: Pairs behind it.
        p: Two-sided p of the sign-flip test over them, `flip_p`.
    """

    value: float
    low: float | None
    high: float | None
    repeats: int
    p: float

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
    p = flip_p(ratios, seed)
    if len(ratios) == 1:
        return Ratio(value, None, None, 1, p)
    return Ratio(value, *_interval(ratios, seed), len(ratios), p)


def flip_p(ratios: Numbers, seed: int = 0) -> float:
    """Two-sided p of the sign-flip test: how often pairs look as uneven if each side is chance.

    Without a difference the two runs of a pair might as well have been swapped, which turns a
    ratio into its inverse. All 2^n ways to swap n pairs are tried, of many pairs 10,000 of them;
    the statistic is the mean of the ratios' logarithms. n pairs give 2/2^n at the least.
    """
    values = np.asarray(ratios, dtype=np.float64)
    if np.any(values <= 0):
        return 1.0
    logs = np.log(values)
    found = abs(float(np.sum(logs)))
    if len(logs) <= _MOST_PAIRS_TRIED_OUT:
        ways = np.arange(2 ** len(logs))[:, None] >> np.arange(len(logs)) & 1
    else:
        drawn = np.random.default_rng(seed).integers(0, 2, size=(_RESAMPLES, len(logs)))
        ways = np.vstack([np.ones((1, len(logs)), dtype=np.int64), drawn])
    sums = np.abs((2.0 * ways - 1.0) @ logs)
    return float(np.mean(sums >= found * (1.0 - 1e-9)))


def _interval(values: npt.NDArray[np.float64], seed: int) -> tuple[float, float]:
    """Percentile bootstrap of the median, 95 %."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(values), size=(_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """What one arm has more than another: median of the differences of paired repeats.

    Attributes:
        value: The median, in the metric's unit.
        low: Lower end of the bootstrap 95 % interval; None with one repeat.
        high: Upper end of it.
        repeats: Pairs behind it.
    """

    value: float
    low: float | None
    high: float | None
    repeats: int


def paired_difference(
    a: Mapping[int, float], b: Mapping[int, float], seed: int = 0
) -> Difference | None:
    """Difference a - b over the repeats that both have, as `paired_ratio` is made; else None."""
    found = np.array([a[r] - b[r] for r in sorted(a.keys() & b.keys())])
    if len(found) == 0:
        return None
    value = float(np.median(found))
    if len(found) == 1:
        return Difference(value, None, None, 1)
    return Difference(value, *_interval(found, seed), len(found))


def coverage_limit(repeats: int) -> float:
    """Largest coverage that an interval of a median can have with so few repeats.

    The interval never leaves the range of the observed ratios, and that range misses the true
    median when all of them fall on one side of it: with probability 2 x 0.5^repeats.
    """
    return 1.0 - 2.0 * math.pow(0.5, repeats)


REPEATS_NEEDED = next(n for n in range(1, 100) if coverage_limit(n) >= 0.95)
"""Fewest paired repeats with which an interval of a median can be one of 95 %."""
