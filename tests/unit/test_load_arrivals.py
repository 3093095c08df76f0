"""Arrival times of open loops: their rates, their spread, and that they can be drawn again."""

from __future__ import annotations

import numpy as np
import pytest

from serving.load.arrivals import arrivals_ns

N = 20_000


def gaps_s(kind: str, rate: float, **options: float) -> np.ndarray:
    times = np.array(arrivals_ns(kind, rate, N, "key", **options)) / 1e9
    return np.diff(times, prepend=0.0)


@pytest.mark.parametrize("rate", [0.5, 100.0])
def test_poisson_gaps_have_mean_and_spread_of_the_rate(rate):
    gaps = gaps_s("poisson", rate)
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    assert gaps.std() == pytest.approx(1 / rate, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_gamma_keeps_the_rate_and_has_the_spread_of_its_shape(burstiness):
    gaps = gaps_s("gamma", 10.0, burstiness=burstiness)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_ramp_rises_linearly_to_its_rate():
    times = np.array(arrivals_ns("ramp", 100.0, N, "key", ramp_from=0.2)) / 1e9
    duration = 2 * N / (20.0 + 100.0)
    assert times[-1] == pytest.approx(duration, rel=0.03)
    counts, _ = np.histogram(times, bins=4, range=(0, duration))
    # Mean rates of the quarters of a line from 20 to 100 per second.
    assert counts / (duration / 4) == pytest.approx([30, 50, 70, 90], rel=0.06)


def test_a_ramp_from_its_whole_rate_is_poisson():
    gaps = gaps_s("ramp", 10.0, ramp_from=1.0)
    assert gaps == pytest.approx(gaps_s("poisson", 10.0))


def test_times_rise_and_follow_from_the_key():
    for kind in ("poisson", "gamma", "ramp"):
        first = arrivals_ns(kind, 5.0, 100, "a")
        assert first == sorted(first)
        assert first == arrivals_ns(kind, 5.0, 100, "a") != arrivals_ns(kind, 5.0, 100, "b")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="arrival 'bursty': choose one of poisson, gamma, ramp"):
        arrivals_ns("bursty", 1.0, 1, "a")
