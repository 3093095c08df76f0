"""Statistics against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.stats import coverage_limit, headline, median, paired_ratio, percentile


def test_percentiles_interpolate_linearly() -> None:
    assert percentile([10, 20, 30, 40], 50) == 25
    assert percentile([10, 20, 30, 40], 95) == pytest.approx(38.5)
    assert percentile([7], 99) == 7
    assert percentile([], 50) is None
    assert median([3.0, 1.0, 2.0]) == 2


def test_the_headline_is_the_median_of_maxima_not_the_maximum_of_medians() -> None:
    # rank 0: 1 1 9, rank 1: 8 2 2 -> maxima 8 2 9 -> 8; the medians of the ranks are 1 and 2.
    rank = np.array([0, 0, 0, 1, 1, 1])
    iteration = np.array([0, 1, 2, 0, 1, 2])
    duration = np.array([1, 1, 9, 8, 2, 2])
    assert headline(rank, iteration, duration) == 8
    shuffled = np.array([4, 2, 0, 5, 1, 3])
    assert headline(rank[shuffled], iteration[shuffled], duration[shuffled]) == 8


def test_the_headline_needs_every_rank_in_every_iteration() -> None:
    with pytest.raises(ValueError, match="iteration 1 has 0 samples of rank 1"):
        headline(np.array([0, 0, 1]), np.array([0, 1, 0]), np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="iteration 0 has 2 samples of rank 0"):
        headline(np.array([0, 0]), np.array([0, 0]), np.array([1, 2]))
    empty = np.array([], dtype=np.int64)
    assert headline(empty, empty, empty) is None


def test_a_ratio_pairs_repeats_by_number() -> None:
    ratio = paired_ratio({0: 2.0, 1: 9.0, 3: 6.0}, {1: 3.0, 0: 1.0, 2: 5.0})
    assert ratio is not None
    assert (ratio.value, ratio.repeats) == (2.5, 2)  # 2/1 and 9/3


def test_one_repeat_gives_no_interval() -> None:
    ratio = paired_ratio({0: 3.0}, {0: 2.0})
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high, ratio.excludes_one) == (1.5, None, None, False)


def test_no_common_repeat_gives_no_ratio() -> None:
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None
    assert paired_ratio({0: 1.0}, {0: 0.0}) is None


def test_the_interval_is_the_same_in_every_run_and_says_whether_it_excludes_one() -> None:
    b = dict.fromkeys(range(8), 1.0)
    above = {r: 1.1 + 0.01 * r for r in range(8)}
    around = {r: 0.9 + 0.03 * r for r in range(8)}
    first, again = paired_ratio(above, b), paired_ratio(above, b)
    assert first == again
    assert first is not None
    assert first.excludes_one
    crossing = paired_ratio(around, b)
    assert crossing is not None
    assert not crossing.excludes_one
    assert paired_ratio(around, b, seed=0) == crossing


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=9))
def test_the_interval_holds_the_median_and_stays_within_the_ratios(values: list[float]) -> None:
    ratio = paired_ratio(dict(enumerate(values)), dict.fromkeys(range(len(values)), 1.0))
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert min(values) <= ratio.low <= ratio.value <= ratio.high <= max(values)


def test_few_repeats_cannot_cover_95_percent() -> None:
    assert coverage_limit(2) == 0.5
    assert coverage_limit(5) == 0.9375
    assert coverage_limit(6) > 0.95
