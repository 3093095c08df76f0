"""Prints a plan: trials, GPUs and a rough time. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ep_ray.config.schema import Config, DeviceKind
from sweeps.estimate import estimate_s
from sweeps.feasible import ranks_of
from sweeps.plan import Trial
from sweeps.progress import clock_text


def print_plan(config: Config, trials: Sequence[Trial], device: DeviceKind) -> None:
    """Prints what an experiment would run on `device`."""
    print(f"{config.name}: {len(trials)} trials on {device.name}, repeats {config.repeats}")
    for _, block in groupby(trials, key=lambda trial: trial.block):
        cells = list(block)
        unit = "GPUs" if device is DeviceKind.cuda else "CPU ranks"
        arms = ", ".join(dict.fromkeys(trial.arm for trial in cells))
        most = max(ranks_of(trial) for trial in cells)
        print(
            f"\n{cells[0].measure}  {arms}: {len(cells)} trials, up to {most} {unit}, "
            f"about {clock_text(estimate_s(cells, device))}"
        )
        for trial in cells:
            print(f"  {trial.trial_id}")
    most = max((ranks_of(trial) for trial in trials), default=0)
    gpus = most if device is DeviceKind.cuda else 0
    print(
        f"\nTogether about {clock_text(estimate_s(trials, device))} and {gpus} GPUs at once. "
        "The time is rough: published rates where a cell was published, else a guess."
    )
