"""When the requests of an open loop are sent: known beforehand, whatever the server does.

A ramp is a Poisson process whose rate rises linearly in time. With rates r0 and r1 and n requests
it lasts T = 2n / (r0 + r1); the i-th arrival is where the integral of the rate reaches the sum of
i unit exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serving.load.seeded import generator

ARRIVALS = ("poisson", "gamma", "ramp")


def arrivals_ns(
    kind: str,
    rate_per_s: float,
    requests: int,
    key: str,
    burstiness: float = 1.0,
    ramp_from: float = 0.1,
) -> list[int]:
    """Nanoseconds from the start of the cell to each request, rising.

    Args:
        kind: `poisson`: independent gaps; `gamma`: gaps of shape `burstiness`, below 1 in bursts,
            above 1 more even; `ramp`: Poisson from `ramp_from * rate_per_s` up to `rate_per_s`.
        rate_per_s: Requests per second; of a ramp, at its end.
        key: Names the draw; another key draws other times.

    Raises:
        ValueError: Unknown kind.
    """
    rng = generator(key)
    if kind == "poisson":
        at_s = np.cumsum(rng.standard_exponential(requests)) / rate_per_s
    elif kind == "gamma":
        at_s = np.cumsum(rng.standard_gamma(burstiness, requests)) / (burstiness * rate_per_s)
    elif kind == "ramp":
        at_s = _ramp(rng, ramp_from * rate_per_s, rate_per_s, requests)
    else:
        raise ValueError(f"arrival {kind!r}: choose one of {', '.join(ARRIVALS)}")
    return [round(1e9 * float(s)) for s in at_s]


def trace_arrivals_ns(at_ms: Sequence[float], rate_per_s: float) -> list[int]:
    """Nanoseconds from the start of the cell to each request: a trace's times at another rate.

    All gaps are stretched alike, so that the mean gap is that of the rate; the first request
    arrives at once.

    Args:
        at_ms: Times of the trace, not falling.
        rate_per_s: Requests per second.

    Raises:
        ValueError: All of several requests arrive at the same time: no stretching gives a rate.
    """
    span = at_ms[-1] - at_ms[0]
    if len(at_ms) > 1 and span <= 0:
        raise ValueError(f"the first {len(at_ms)} entries of the trace arrive at the same time")
    stretch = (len(at_ms) - 1) / rate_per_s / span if span else 0.0
    return [round(1e9 * stretch * (at - at_ms[0])) for at in at_ms]


def _ramp(rng: np.random.Generator, first: float, last: float, requests: int) -> np.ndarray:
    events = np.cumsum(rng.standard_exponential(requests))
    slope = (last**2 - first**2) / (2 * requests)  # (last - first) / T
    # first * t + slope / 2 * t^2 = events, solved in the form that also holds for slope 0
    return 2 * events / (first + np.sqrt(first**2 + 2 * slope * events))
