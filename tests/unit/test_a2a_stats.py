from __future__ import annotations

import numpy as np
import pytest

from ep_ray.a2a.stats import (
    concat,
    headline_ns,
    pooled,
    rank_medians_ns,
    series,
    slowest_rank_ns,
)
from ep_ray.a2a.timing import WINDOW, settled


def two_ranks() -> list[list[int]]:
    return [[10, 50, 10, 50, 30], [50, 10, 50, 10, 20]]


def test_the_headline_is_the_median_of_maxima_not_the_maximum_of_medians() -> None:
    samples = concat([series("pair", "measured", r, d) for r, d in enumerate(two_ranks())])
    assert slowest_rank_ns(samples, "pair").tolist() == [50, 50, 50, 50, 30]
    assert headline_ns(samples, "pair") == 50
    assert rank_medians_ns(samples, "pair") == {0: 30, 1: 20}


def test_order_of_samples_does_not_matter() -> None:
    samples = concat([series("pair", "measured", r, d) for r, d in enumerate(two_ranks())])
    mixed = np.random.default_rng(0).permutation(len(samples))
    shuffled = type(samples)(*(column[mixed] for column in samples.columns()))
    assert headline_ns(shuffled, "pair") == headline_ns(samples, "pair")


def test_only_measured_samples_count() -> None:
    rest = [series("pair", role, 0, [10**9]) for role in ("cold", "warmup", "floor")]
    samples = concat([*rest, series("pair", "measured", 0, [1, 2, 3])])
    assert headline_ns(samples, "pair") == 2
    assert pooled(samples, "pair").p99_ns < 4
    assert len(samples.of("pair", "cold")) == 1


def test_pooled_percentiles_interpolate() -> None:
    samples = series("pair", "measured", 0, list(range(101)))
    found = pooled(samples, "pair")
    assert (found.p50_ns, found.p95_ns, found.p99_ns) == (50, 95, 99)


def test_the_headline_needs_every_rank_once_in_every_iteration() -> None:
    samples = concat([series("pair", "measured", 0, [1, 2]), series("pair", "measured", 1, [1])])
    with pytest.raises(ValueError, match="iteration 1 has 0 samples of rank 1"):
        headline_ns(samples, "pair")
    twice = concat([samples, series("pair", "measured", 1, [1])])  # as many as a whole grid
    with pytest.raises(ValueError, match="iteration 0 has 2 samples of rank 1, wanted one"):
        headline_ns(twice, "pair")
    with pytest.raises(ValueError, match="0 measured samples"):
        headline_ns(concat([]), "pair")


def test_warm_up_settles_on_two_like_windows() -> None:
    slow, fast = [120] * WINDOW, [100] * WINDOW
    assert not settled(fast, 0.02)
    assert not settled(slow + fast, 0.02)
    assert settled(slow + fast + [102] * WINDOW, 0.02)
    assert not settled(slow + fast + [103] * WINDOW, 0.02)
