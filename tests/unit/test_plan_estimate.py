"""The printed plan and its rough time."""

from __future__ import annotations

import os
import sys

import pytest

from ep_ray.config.compose import compose_all
from ep_ray.config.schema import Config, DeviceKind
from sweeps.estimate import ENGINE_START_S, RAY_START_S, block_s, estimate_s
from sweeps.plan import plan
from sweeps.print_plan import plan_lines, print_plan
from sweeps.progress import clock_text

CUDA, CPU = DeviceKind.cuda, DeviceKind.cpu


@pytest.fixture(scope="module")
def wide_tp() -> Config:
    (config,) = compose_all(["+exp=wide_tp", "repeats=2"], multirun=False)
    return config


def test_a_published_cell_takes_its_tokens_over_the_published_rate(wide_tp):
    (trial,) = [t for t in plan(wide_tp, CUDA) if t.cell == "1024-256-c1" and t.repeat == 0]
    # 32 requests of 256 tokens at the published tokens per second.
    seconds = block_s([trial], CUDA) - ENGINE_START_S[CUDA]
    assert seconds == pytest.approx(32 * 256 / rate("wide_tp", "1024/256", 1))


def rate(arm: str, shape: str, concurrency: int) -> float:
    from sweeps.published.data import external_dp

    (row,) = [
        r for r in external_dp() if (r.arm, r.shape, r.concurrency) == (arm, shape, concurrency)
    ]
    assert row.output_tok_per_s is not None
    return float(row.output_tok_per_s)


def test_one_arm_keeps_its_engines_over_repeats(wide_tp):
    trials = plan(wide_tp, CUDA)
    assert [t.repeat for t in trials] == [0] * 12 + [1] * 12
    assert {t.block for t in trials} == {trials[0].block}
    assert estimate_s(trials, CUDA) == pytest.approx(RAY_START_S + block_s(trials, CUDA))
    assert estimate_s([], CUDA) == 0


def test_a_running_server_is_not_started():
    overrides = ["+exp=attached", "arm.url=http://h:1", "load.concurrency=[1]", "load.shapes=[8/9]"]
    (config,) = compose_all(overrides, multirun=False)
    # 8 requests of 9 tokens at 0.03 s each.
    assert block_s(plan(config, CPU), CPU) == pytest.approx(8 * 9 * 0.03)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (75, "1 min 15 s"), (3661, "61 min 1 s")],
)
def test_clock_text(seconds, text):
    assert clock_text(seconds) == text


def test_lines_of_a_plan(wide_tp):
    trials = plan(wide_tp, CUDA)
    lines = list(plan_lines(wide_tp, trials, CUDA))
    assert lines[0] == "wide_tp: 24 trials on cuda, repeats 2"
    assert lines[1].startswith("\nserving  wide_tp: 24 trials, up to 8 GPUs, about ")
    assert [line.strip() for line in lines[2:26]] == [t.trial_id for t in trials]
    assert lines[-1].startswith(f"\nTogether about {clock_text(estimate_s(trials, CUDA))} and 8 ")


def test_a_reader_that_has_seen_enough_is_no_failure(wide_tp, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        print_plan(wide_tp, plan(wide_tp, CUDA), CUDA)
        monkeypatch.undo()
