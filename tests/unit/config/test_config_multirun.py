"""Every point of a sweep is composed and checked before Hydra would start the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError

SWEEPER = """# @package _global_
defaults: [override /workload: quick]
name: mine
measure: [a2a]
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      workload.hidden: 128,256
      workload.zipf_exponent: 1.1
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text(SWEEPER)
    return str(tmp_path)


def test_points_come_in_the_order_of_hydra():
    points = compose_all(["+exp=quickstart", "seed=1,2", "repeats=1,3"], multirun=True)
    assert [(p.seed, p.repeats) for p in points] == [(1, 1), (1, 3), (2, 1), (2, 3)]


def test_ranges_choices_and_globs_are_expanded():
    points = compose_all(["+exp=quickstart", "seed=range(3)", "load=glob(*)"], multirun=True)
    assert [(p.seed, p.load.min_requests) for p in points] == [
        (seed, requests) for seed in (0, 1, 2) for requests in (32, 8)
    ]


def test_several_experiments_both_run():
    points = compose_all(["+exp=a2a_decode,a2a_prefill", "seed=7"], multirun=True)
    assert [(p.name, p.seed) for p in points] == [("a2a_decode", 7), ("a2a_prefill", 7)]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["load.warmups=1,2,x"], "`load.warmups` in override `load.warmups=x`"),
        (["load=quick,qick"], "no `load` called `qick`, asked for in override `load=qick`"),
        (["repeats=1,0"], "`repeats=0`: at least 1\n  in: +exp=quickstart repeats=0"),
        (["+arm.tpp=1,2"], "unknown key `arm.tpp` in override `+arm.tpp=1`"),
        (["+exp=quickstart,attached"], "`arm.url` is missing"),
    ],
)
def test_a_mistake_in_any_point_is_found_beforehand(overrides, problem):
    base = [] if overrides[0].startswith("+exp") else ["+exp=quickstart"]
    with pytest.raises(ConfigError) as caught:
        compose_all([*base, *overrides], multirun=True)
    assert problem in str(caught.value)


def test_a_sweep_over_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"no point to run: a sweep in .*seed=glob\(\*\)"):
        compose_all(["+exp=quickstart", "seed=glob(*)"], multirun=True)


def test_an_experiment_sweeps_by_itself(folder):
    points = compose_all(["+exp=mine"], False, folder)
    assert [p.workload.hidden for p in points] == [128, 256]
    assert {p.workload.zipf_exponent for p in points} == {1.1}


def test_the_command_line_wins_over_the_experiments_own_sweep(folder):
    points = compose_all(["+exp=mine", "workload.hidden=512"], False, folder)
    assert [p.workload.hidden for p in points] == [512]
    points = compose_all(["+exp=mine", "workload.hidden=512,640,768"], False, folder)
    assert [p.workload.hidden for p in points] == [512, 640, 768]
    points = compose_all(["+exp=mine", "seed=1,2"], True, folder)
    assert [(p.workload.hidden, p.seed) for p in points] == [
        (128, 1), (128, 2), (256, 1), (256, 2),
    ]  # fmt: skip


def test_a_wrong_point_of_the_experiments_own_sweep(folder):
    with pytest.raises(ConfigError) as caught:
        compose_all(["+exp=mine", "workload.hidden=512,130"], False, folder)
    assert "`workload.hidden=130`: a multiple of 128" in str(caught.value)
    assert "searchpath" not in str(caught.value)


def test_several_experiments_one_of_which_sweeps_by_itself_are_refused(folder):
    with pytest.raises(ConfigError) as caught:
        compose_all(["+exp=a2a_decode,mine"], True, folder)
    assert "would drop the sweep that experiment `mine` defines for itself" in str(caught.value)
