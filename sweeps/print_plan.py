"""A plan in words: trials, GPUs and a rough time. Starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from ep_ray.config.schema import Config, DeviceKind
from sweeps.estimate import block_s, estimate_s
from sweeps.feasible import ranks_of
from sweeps.progress import clock_text
from sweeps.trial import Trial


def print_plan(config: Config, trials: Sequence[Trial], device: DeviceKind) -> None:
    """Prints what an experiment would run on `device`."""
    try:
        print("\n".join(plan_lines(config, trials, device)), flush=True)
    except BrokenPipeError:
        # The reader (`head`, a pager) has seen enough; nothing is wrong with the plan.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plan_lines(config: Config, trials: Sequence[Trial], device: DeviceKind) -> Iterator[str]:
    """The lines of a plan: each block with its trials, and the sum."""
    yield f"{config.name}: {len(trials)} trials on {device.name}, repeats {config.repeats}"
    unit = "GPUs" if device is DeviceKind.cuda else "CPU ranks"
    for _, block in groupby(trials, key=lambda trial: trial.block):
        cells = list(block)
        arms = ", ".join(dict.fromkeys(trial.arm for trial in cells))
        most = max(ranks_of(trial) for trial in cells)
        yield (
            f"\n{cells[0].measure}  {arms}: {len(cells)} trials, up to {most} {unit}, "
            f"about {clock_text(block_s(cells, device))}"
        )
        yield from (f"  {trial.trial_id}" for trial in cells)
    most = max((ranks_of(trial) for trial in trials), default=0)
    yield (
        f"\nTogether about {clock_text(estimate_s(trials, device))} and {most} {unit} at once. "
        "The time is rough: published rates where a cell was published, else a guess."
    )
