"""Shows a sweep while it runs: a bar on a terminal, gauges for the Ray dashboard."""

from __future__ import annotations

import sys

from ray.experimental import tqdm_ray
from ray.util.metrics import Gauge

from sweeps.outcome import UNAVAILABLE


class Progress:
    """Bar and gauges of one experiment; without a terminal there is no bar.

    Args:
        experiment: Its name.
        total: Trials to run.
    """

    def __init__(self, experiment: str, total: int) -> None:
        self._tags = {"experiment": experiment}
        self._bar = tqdm_ray.tqdm(desc=experiment, total=total) if sys.stderr.isatty() else None
        keys = ("experiment",)
        self._trials = Gauge("ep_ray_trials", "Trials by state", (*keys, "state"))
        self._value = Gauge(
            "ep_ray_last_value", "Headline of the last trial", (*keys, "arm", "what")
        )
        states = ("ok", "failed", "timeout", "crash", UNAVAILABLE)
        self._counts = {"planned": total, **dict.fromkeys(states, 0)}
        self._publish()

    def begin(self, trial_id: str) -> None:
        """Names the trial that runs now."""
        if self._bar is not None:
            self._bar.set_description(trial_id)

    def end(self, status: str, arm: str, values: dict[str, float]) -> None:
        """Counts a finished trial and publishes its headline figures."""
        self._counts[status] += 1
        for what, value in values.items():
            self._value.set(value, {**self._tags, "arm": arm, "what": what})
        self._publish()
        if self._bar is not None:
            self._bar.update(1)

    def _publish(self) -> None:
        for state, count in self._counts.items():
            self._trials.set(count, {**self._tags, "state": state})

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()


def clock_text(seconds: float) -> str:
    """`75` seconds as `1 min 15 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
