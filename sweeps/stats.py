"""Statistics of repeats: pure functions over numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = Sequence[float] | Sequence[int] | npt.NDArray[np.int64] | npt.NDArray[np.float64]

_RESAMPLES = 10_000


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
