"""What a wrong command line or YAML file answers: the key, the place, the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError, did_you_mean, nearest

QUICK = "+exp=quickstart"


def refused(*overrides: str, multirun: bool = False, folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose_all(overrides, multirun, str(folder) if folder else None)
    return str(caught.value)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


UNKNOWN = [
    ("arm.tpp=1", "arm.tpp", "arm.tp"),
    ("+arm.tpp=1", "arm.tpp", "arm.tp"),
    ("++arm.tpp=1", "arm.tpp", "arm.tp"),
    ("load.concurency=[1]", "load.concurency", "load.concurrency"),
    ("+load.concurency=[1]", "load.concurency", "load.concurrency"),
    ("cluster.gpu=3", "cluster.gpu", "cluster.gpus"),
    ("against.arms.wide_tp.tpp=3", "against.arms.wide_tp.tpp", "against.arms.wide_tp.tp"),
    ("+against.arms.wide_tp.tpp=3", "against.arms.wide_tp.tpp", "against.arms.wide_tp.tp"),
    (
        "workload.phases.decode.token=3",
        "workload.phases.decode.token",
        "workload.phases.decode.tokens",
    ),
    ("repaets=3", "repaets", "repeats"),
    ("+repaets=3", "repaets", "repeats"),
    ("lod.warmups=1", "lod", "load"),
    ("+lod.warmups=1", "lod", "load"),
]


@pytest.mark.parametrize(("override", "key", "near"), UNKNOWN)
def test_a_misspelt_key_is_named_with_its_override_and_the_nearest(override, key, near):
    message = refused(QUICK, override)
    assert f"unknown key `{key}` in override `{override}`" in message
    assert f"did you mean `{near}`?" in message
    assert "allowed: " in message


def test_the_allowed_keys_are_those_of_the_place():
    message = refused(QUICK, "workload.phases.decode.speed=3")
    assert message.endswith("allowed: iterations, tokens")


def test_a_misspelt_group_option_lists_the_options():
    assert refused(QUICK, "load=qick") == (
        "no `load` called `qick`, asked for in override `load=qick`: did you mean `quick`? "
        "allowed: published, quick"
    )


def test_a_misspelt_experiment_lists_the_experiments():
    message = refused("+exp=quickstrat")
    assert "no `exp` called `quickstrat`, asked for in override `+exp=quickstrat`" in message
    assert "did you mean `quickstart`? allowed: a2a_backends, a2a_decode, a2a_graph" in message


def test_an_experiment_without_its_plus():
    assert refused("exp=quickstart") == "`exp` is chosen with a plus here: write `+exp=...`"


def test_no_experiment_lists_them():
    message = refused()
    assert "no experiment chosen: write +exp=NAME; there are a2a_backends" in message
    assert "wide_tp" in message


WRONG_TYPES = [
    ("load.warmups=abc", "load.warmups", "'abc' of type 'str' could not be converted to Integer"),
    ("++load.warmups=abc", "load.warmups", "could not be converted to Integer"),
    ("repeats=1.5", "repeats", "could not be converted to Integer"),
    ("arm.enable_ep=perhaps", "arm.enable_ep", "is not a valid bool"),
    ("arm.tp=null", "arm.tp", "is not Optional"),
    ("transport.kind=tpc", "transport.kind", "expected one of [auto, nvlink, shm, tcp, ib, efa]"),
    (
        "arm.kind=wide",
        "arm.kind",
        "expected one of [wide_tp, external_dp, internal_dp, hybrid_dp, attached, null_engine]",
    ),
    ("measure=[a2aa]", "measure[0]", "expected one of [a2a, serving]"),
    ("load.concurrency=4", "load.concurrency", "Write a list: load.concurrency=[...]"),
    ("measure=a2a", "measure", "Write a list: measure=[...]"),
    ("load.concurrency=[1,two]", "load.concurrency[1]", "could not be converted to Integer"),
    ("against.arms.wide_tp.tp=x", "against.arms.wide_tp.tp", "could not be converted to Integer"),
]


@pytest.mark.parametrize(("override", "key", "why"), WRONG_TYPES)
def test_a_wrong_value_is_named_with_its_override_and_what_is_allowed(override, key, why):
    message = refused(QUICK, override)
    assert f"`{key}` in override `{override}`: " in message
    assert why in message


HOW_TO_ADD = [
    ("against.arms.new.tp=3", "+arm@against.arms.new=NAME (NAME from conf/arm/)"),
    ("+against.arms.new.tp=3", "+arm@against.arms.new=NAME (NAME from conf/arm/)"),
    ("+against.backends.new.name=x", "+backend@against.backends.new=NAME"),
    ("workload.phases.mid.tokens=3", "+workload.phases={mid: {tokens: ..., iterations: ...}}"),
    ("+workload.phases.mid.tokens=3", "+workload.phases={mid: {tokens: ..., iterations: ...}}"),
    ("arm.env.NCCL_DEBUG=WARN", "+arm.env.NCCL_DEBUG=VALUE"),
    ("transport.env.NCCL_DEBUG=WARN", "+transport.env.NCCL_DEBUG=VALUE"),
]


@pytest.mark.parametrize(("override", "how"), HOW_TO_ADD)
def test_a_new_name_tells_how_it_is_added(override, how):
    message = refused(QUICK, override)
    assert f"override `{override}`" in message
    assert f"yet; add it with {how}" in message


def test_the_advised_ways_to_add_work():
    (config,) = compose_all(
        [
            QUICK,
            "+arm@against.arms.new=wide_tp",
            "against.arms.new.name=new",
            "+workload.phases={mid: {tokens: 3, iterations: 2}}",
            "+arm.env.NCCL_DEBUG=WARN",
            "+transport@arm.transport=tcp",
        ],
        multirun=False,
    )
    assert list(config.against.arms) == ["wide_tp", "new"]
    assert list(config.workload.phases) == ["decode", "prefill", "mid"]
    assert config.arm.env == {"NCCL_DEBUG": "WARN"}
    assert config.arm.transport is not None
    assert config.arm.transport.kind.name == "tcp"


@pytest.mark.parametrize("override", ["arm.transport.kind=tcp", "+arm.transport.kind=tcp"])
def test_a_key_below_a_section_that_is_null(override):
    message = refused(QUICK, override)
    assert f"`arm.transport` is null, so override `{override}` has nothing to change" in message
    assert "+transport@arm.transport=NAME" in message


def test_an_override_that_cannot_be_read():
    message = refused(QUICK, "load.shapes")
    assert "cannot read override `load.shapes`" in message
    assert "write KEY=VALUE" in message


def test_a_plus_before_a_key_that_is_there():
    message = refused(QUICK, "+load.warmups=1")
    assert "An item is already at 'load.warmups'" in message
    assert "remove + prefix: 'load.warmups=1'" in message


def test_a_sweep_without_multirun_says_how():
    message = refused(QUICK, "load.warmups=1,2")
    assert "load.warmups=1,2" in message
    assert "--multirun" in message


def test_an_interpolation_to_nowhere():
    assert "Interpolation key 'nme' not found" in refused(QUICK, "name=${nme}")


def test_a_deleted_group_leaves_values_missing():
    assert "no value for `load.shapes`: give one with KEY=VALUE" in refused(QUICK, "~load")


def test_a_folder_of_configs_that_does_not_exist(tmp_path):
    folder = tmp_path / "mine"
    assert refused(QUICK, folder=folder) == f"--config-dir={folder}: no such folder"


EXP = "# @package _global_\nname: mine\nmeasure: [serving]\n"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("repaets: 2", "unknown key `repaets` in file"),
        ("arm: {tpp: 1}", "unknown key `arm.tpp` in file"),
        ("repeats: many", "`repeats` in file"),
        (
            "defaults: [/arm@against.arms.x: wide_tp]\nagainst: {arms: {x: {nmae: foo}}}",
            "unknown key `against.arms.x.nmae` in file",
        ),
    ],
)
def test_a_wrong_file_of_ones_own_is_named(tmp_path, body, problem):
    folder = write(tmp_path, "exp/mine", f"{EXP}{body}\n")
    message = refused("+exp=mine", folder=folder)
    assert f"{problem} `exp/mine.yaml` of --config-dir: " in message


def test_a_wrong_group_file_is_named(tmp_path):
    folder = write(tmp_path, "load/mine", "shapes: [8/8]\nconcurrencyy: [1]\n")
    message = refused(QUICK, "load=mine", folder=folder)
    assert "unknown key `load.concurrencyy` in file `load/mine.yaml` of --config-dir" in message
    assert "did you mean `load.concurrency`?" in message


def test_a_group_option_that_a_file_misspells(tmp_path):
    folder = write(tmp_path, "exp/mine", f"{EXP}defaults: [override /load: qick]\n")
    message = refused("+exp=mine", folder=folder)
    assert "no `load` called `qick`, asked for in the defaults of the experiment" in message
    assert "did you mean `quick`?" in message


def test_a_group_that_a_file_chooses_without_override(tmp_path):
    folder = write(tmp_path, "exp/mine", f"{EXP}defaults: [/load: quick]\n")
    assert "`override /load: NAME`" in refused("+exp=mine", folder=folder)


def test_yaml_that_cannot_be_parsed_is_named(tmp_path):
    folder = write(tmp_path, "exp/mine", "name: [mine\n")
    message = refused("+exp=mine", folder=folder)
    assert str(folder / "exp" / "mine.yaml") in message
    assert "line" in message


def test_a_file_may_add_an_arm_without_defaults(tmp_path):
    body = "against: {arms: {x: {name: x, kind: wide_tp, tp: 2, router: none}}}\n"
    (config,) = compose_all(["+exp=mine"], False, str(write(tmp_path, "exp/mine", EXP + body)))
    assert config.against.arms["x"].tp == 2


def test_nearest_and_its_line():
    assert nearest("warmup", ["warmups", "shapes"]) == "warmups"
    assert nearest("zzz", ["warmups", "shapes"]) is None
    assert did_you_mean("warmup", ["warmups", "shapes"], "load.") == (
        "did you mean `load.warmups`? allowed: shapes, warmups"
    )
    assert did_you_mean("zzz", []) == "allowed: nothing"
