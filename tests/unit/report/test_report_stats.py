"""Statistics against values worked out by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sweeps.stats import REPEATS_NEEDED, coverage_limit, flip_p, median, paired_ratio


def test_a_median_is_of_the_middle_two_and_of_nothing_undefined() -> None:
    assert median([3.0, 1.0, 2.0]) == 2
    assert median([10, 40, 20, 30]) == 25
    assert median([]) is None


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
    assert REPEATS_NEEDED == 6


def test_the_sign_flip_test_counts_the_ways_to_swap_pairs() -> None:
    assert flip_p([2.0] * 5) == 2 / 32
    assert flip_p([2.0] * 6) == flip_p([0.5] * 6) == 2 / 64
    assert flip_p([1.0] * 6) == flip_p([2.0, 0.5]) == 1.0
    # 4 x 4 x 4 / 2: only no swap, that of the 2, and the mirror images of both are as uneven.
    assert flip_p([4.0, 4.0, 4.0, 0.5]) == 4 / 16
    assert flip_p([2.0, 0.0]) == 1.0


def test_the_sign_flip_test_samples_the_ways_of_many_pairs() -> None:
    assert flip_p([2.0] * 40) == 1 / 10_001
    assert flip_p([2.0, 0.5] * 20) == 1.0
