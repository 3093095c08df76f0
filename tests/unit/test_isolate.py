"""`isolate=true`: which arms and which all-to-all cells it adds, and what it refuses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ep_ray.config.check import arms_of
from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import Config, DeviceKind, LaunchKind, Measure, RouterPolicy
from sweeps.isolate import decode_tokens, parts, prefill_tokens
from sweeps.plan import plan
from sweeps.trial import A2aTrial, ServingTrial

CPU, CUDA = DeviceKind.cpu, DeviceKind.cuda


def composed(*overrides: str) -> Config:
    (config,) = compose_all(overrides, multirun=False)
    return config


def study(*overrides: str) -> Config:
    """The published arms with a model that can be made here."""
    return composed("+exp=external_dp_rdma", "model=lite", "isolate=true", *overrides)


def kinds(config: Config) -> dict[str, tuple[str, str | None, int]]:
    return {a.name: (a.kind.name, a.router and a.router.name, a.dp) for a in arms_of(config)}


def test_arms_behind_a_router_have_twins_and_null_engines_stand_in():
    assert kinds(study()) == {
        "external_dp_rdma": ("external_dp", None, 4),
        "external_dp_tcp": ("external_dp", None, 4),
        "wide_tp": ("wide_tp", "none", 1),
        "external_dp_rdma_direct": ("external_dp", "none", 4),
        "external_dp_tcp_direct": ("external_dp", "none", 4),
        "null_x4_round_robin": ("null_engine", "round_robin", 4),
        "null_x4_direct": ("null_engine", "none", 4),
    }


def test_a_twin_shares_the_engines_and_takes_turns():
    trials = [t for t in plan(study(), CUDA) if isinstance(t, ServingTrial)]
    deployments = {t.arm: t.deployment for t in trials}
    assert deployments["external_dp_rdma"] == deployments["external_dp_rdma_direct"]
    assert deployments["null_x4_round_robin"] == deployments["null_x4_direct"]
    assert len(set(deployments.values())) == 4
    assert {t.router for t in trials if t.arm.endswith("_direct")} == {RouterPolicy.none}
    assert {t.gpus for t in trials if t.arm.startswith("null_")} == {0}


def test_without_a_router_there_is_nothing_to_add():
    config = composed("+exp=wide_tp", "model=lite", "isolate=true")
    assert len(arms_of(config)) == len(arms_of(composed("+exp=wide_tp", "model=lite")))


def test_a_running_server_with_ranks_has_no_twin_for_its_url_is_not_the_ranks_in_turn():
    urls = "arm.rank_urls=[http://h:1,http://h:2]"
    behind = ("+exp=attached", "arm.url=http://h:1", "arm.router=random", "isolate=true")
    assert list(kinds(composed(*behind, urls))) == [
        *("attached", "null_x2_random", "null_x2_direct"),
    ]
    assert list(kinds(composed(*behind))) == [
        *("attached", "attached_direct", "null_x1_random", "null_x1_direct"),
    ]


def test_the_collective_of_each_arm_is_measured_alone(tmp_path):
    first, *alone = parts(study(), CUDA, tmp_path)
    assert first.measure == [Measure.serving]
    assert [part.transport.kind.name for part in alone] == ["ib", "tcp"]
    for part in alone:
        work = part.workload
        assert (part.measure, part.isolate, part.against.backends) == ([Measure.a2a], False, {})
        assert (work.hidden, work.experts, work.topk) == (2048, 64, 6)
        assert (work.ep, work.local_tp) == ([8], 2)
        assert (work.dispatch_dtype.name, work.combine_dtype.name) == ("bf16", "bf16")
        assert work.launch == [LaunchKind.eager, LaunchKind.graph]
        assert {name: phase.tokens for name, phase in work.phases.items()} == {
            # c = 1 and 4 have one sequence a rank, which its two TP ranks share as two
            "decode_2": 2,
            "decode_4": 4,
            "decode_8": 8,
            "decode_16": 16,
            "prefill_1024": 1024,
            "prefill_4096": 4096,
        }
        trials = plan(part, CUDA)
        assert all(isinstance(t, A2aTrial) for t in trials)
        assert {t.arm for t in trials} == {"nccl_equal"}


def test_on_the_cpu_nothing_is_replayed_from_graphs(tmp_path):
    config = composed("+exp=quickstart", "isolate=true")
    first, alone = parts(config, CPU, tmp_path)
    assert first is config
    assert alone.workload.launch == [LaunchKind.eager]
    assert {t.arm for t in plan(alone, CPU)} == {"gloo_equal"}
    assert (alone.workload.hidden, alone.workload.ep) == (256, [2])


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("deepep_low_latency", {"variant": "low_latency"}),
        ("deepep_high_throughput", {"variant": "normal"}),
        ("flashinfer_all2allv", {}),
    ],
)
def test_the_collective_is_that_of_the_arms_library(tmp_path, backend, options):
    config = composed("+exp=quickstart", "isolate=true", f"arm.all2all_backend={backend}")
    _, alone = parts(config, CPU, tmp_path)
    assert alone.backend.name in backend
    assert alone.backend.options == options
    assert alone.against.skip_unavailable


@pytest.mark.parametrize(
    "overrides",
    [
        ("arm.all2all_backend=naive",),  # no adapter does what it does
        ("arm.enable_ep=false", "arm.ep=null"),
        ("isolate=false",),
    ],
)
def test_what_has_no_collective_is_measured_without(tmp_path, overrides):
    config = composed("+exp=quickstart", "isolate=true", *overrides)
    assert parts(config, CPU, tmp_path) == [config]


def test_an_open_loop_has_no_decode_step_of_known_size(tmp_path):
    rates = ("load.arrival=poisson", "load.rate=[2]", "load.concurrency=[]")
    _, alone = parts(composed("+exp=quickstart", "isolate=true", *rates), CPU, tmp_path)
    assert list(alone.workload.phases) == ["prefill_64", "prefill_128"]


def test_steps_hold_no_more_sequences_than_the_engines_admit():
    arm = study().arm
    assert (arm.tp, arm.dp, arm.max_num_seqs) == (2, 4, 16)
    assert [decode_tokens(arm, c) for c in (1, 8, 9, 12, 64, 1000)] == [2, 2, 4, 4, 16, 16]
    assert [prefill_tokens(arm, n) for n in (1, 1024)] == [2, 1024]


def test_a_missing_model_is_said_before_anything_starts():
    config = composed("+exp=external_dp_rdma", "isolate=true")
    with pytest.raises(ConfigError, match="isolate=true takes the collective's shape from it"):
        parts(config, CUDA, Path())


def test_it_takes_serving_arms_apart_and_nothing_else():
    with pytest.raises(ConfigError, match="`measure` has no serving"):
        composed("+exp=a2a_decode", "isolate=true")


def test_names_of_its_own_that_are_taken_are_refused():
    taken = ("+exp=quickstart", "isolate=true", "against.arms.wide_tp.name=external_dp_direct")
    with pytest.raises(ConfigError, match="two arms are called `external_dp_direct`"):
        composed(*taken)


@pytest.mark.parametrize("override", ["arm.tp=2", "arm.enable_ep=true"])
def test_a_null_engine_has_no_model_to_spread(override):
    with pytest.raises(ConfigError, match="a null_engine has no model"):
        composed("+exp=attached", "arm=null_engine", override)


def test_repeats_measure_the_collective_as_often(tmp_path):
    _, alone = parts(composed("+exp=quickstart", "isolate=true", "repeats=3"), CPU, tmp_path)
    assert set(Counter(t.cell for t in plan(alone, CPU)).values()) == {3}
