"""Every experiment that ships composes and plans, with the published values."""

from __future__ import annotations

from functools import cache

import pytest

from ep_ray.config.check import arms_of
from ep_ray.config.compose import compose_all
from ep_ray.config.folder import config_dir, experiments
from ep_ray.config.schema import ArmKind, Config, DeviceKind, RouterPolicy
from sweeps.feasible import gpus_needed, resolve_device
from sweeps.plan import plan
from sweeps.trial import A2aTrial, ServingTrial

# Experiment: trials on its device, and the most ranks of one.
SHIPPED = {
    "a2a_backends": (22, 8),
    "a2a_decode": (5, 128),
    "a2a_graph": (4, 2),
    "a2a_one_gpu": (88, 2),
    "a2a_prefill": (5, 128),
    "a2a_routing": (8, 8),
    "a2a_scaling": (14, 128),
    "a2a_transports": (4, 8),
    "a2a_variants": (12, 4),
    "attached": (6, 0),
    "external_dp_rdma": (36, 8),
    "external_dp_tcp": (24, 8),
    "gpu_quickstart": (4, 1),
    "one_gpu": (48, 1),
    "open_loop": (4, 2),
    "quickstart": (16, 4),
    "router_cost": (54, 1),
    "router_policies": (5, 2),
    "shared_gpu": (3, 2),
    "two_gpus": (48, 2),
    "wide_tp": (12, 8),
}
REVISION = "85864749cd611b4353ce1decdb286193298f64c7"


@cache
def config_of(experiment: str) -> Config:
    url = ["arm.url=http://127.0.0.1:1"] if experiment == "attached" else []
    # `a2a_transports` sweeps by itself: its first point stands for all.
    return compose_all([f"+exp={experiment}", *url], multirun=False)[0]


def test_this_file_knows_every_experiment():
    assert experiments() == sorted(SHIPPED)


@pytest.mark.parametrize("experiment", SHIPPED)
def test_it_composes_and_plans(experiment):
    config = config_of(experiment)
    assert config.name == experiment
    trials = plan(config, resolve_device(config, []))
    assert (len(trials), gpus_needed(trials)) == SHIPPED[experiment]


@pytest.mark.parametrize("experiment", SHIPPED)
def test_each_says_in_its_first_comment_what_it_is(experiment):
    lines = (config_dir() / "exp" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# ")


@pytest.mark.parametrize("experiment", ["external_dp_tcp", "external_dp_rdma", "wide_tp"])
def test_the_published_study(experiment):
    config = config_of(experiment)
    assert config.cluster.device is DeviceKind.cuda
    assert config.model.path == "deepseek-ai/DeepSeek-V2-Lite-Chat"
    assert config.model.revision == REVISION
    assert (config.model.experts, config.model.vocab_size) == (64, 102400)
    assert config.model.max_model_len == 8192
    assert config.load.shapes == ["1024/256", "4096/128"]
    assert config.load.concurrency == [1, 4, 8, 16, 32, 64]
    assert (config.load.warmups, config.load.calibration) == (4, 1)
    for arm in arms_of(config):
        assert arm.max_num_seqs == 16
        assert arm.gpu_memory_utilization == 0.90
        assert arm.vllm_port == 19500
        assert not arm.enforce_eager
        wide = arm.kind is ArmKind.wide_tp
        assert (arm.tp, arm.dp) == ((8, 1) if wide else (2, 4))
        assert (arm.enable_ep, arm.ep) == ((False, None) if wide else (True, 8))
        assert wide or arm.all2all_backend == "allgather_reducescatter"


@pytest.mark.parametrize(
    ("experiment", "arms"),
    [
        ("external_dp_tcp", {"external_dp_tcp": "tcp", "wide_tp": "auto"}),
        (
            "external_dp_rdma",
            {"external_dp_rdma": "ib", "external_dp_tcp": "tcp", "wide_tp": "auto"},
        ),
    ],
)
def test_arms_transports_routers_and_requests_of_the_study(experiment, arms):
    trials = [
        t for t in plan(config_of(experiment), DeviceKind.cuda) if isinstance(t, ServingTrial)
    ]
    assert {t.arm: t.transport.kind.name for t in trials} == arms
    for arm in arms:
        own = [t for t in trials if t.arm == arm]
        assert len(own) == 12
        assert sum(t.requests for t in own) == 1088
        router = RouterPolicy.none if arm == "wide_tp" else RouterPolicy.round_robin
        assert {t.router for t in own} == {router}


@pytest.mark.parametrize(
    ("experiment", "phase", "tokens", "iterations"),
    [("a2a_decode", "decode", 128, 200), ("a2a_prefill", "prefill", 4096, 50)],
)
def test_the_published_all_to_all_shapes(experiment, phase, tokens, iterations):
    config = config_of(experiment)
    work = config.workload
    assert (work.hidden, work.experts, work.topk) == (7168, 256, 8)
    assert (work.dispatch_dtype.name, work.combine_dtype.name) == ("fp8", "bf16")
    trials = [t for t in plan(config, DeviceKind.cuda) if isinstance(t, A2aTrial)]
    assert [t.ep for t in trials] == [8, 16, 32, 64, 128]
    assert {(t.phase, t.tokens, t.iterations) for t in trials} == {(phase, tokens, iterations)}
    assert {(t.arm, t.routing.name) for t in trials} == {("nccl", "uniform")}


def test_the_quickstart_needs_no_gpu():
    config = config_of("quickstart")
    assert config.cluster.device is DeviceKind.cpu
    assert config.model.made == "tiny"
    assert [(a.name, a.tp, a.dp, a.ep) for a in arms_of(config)] == [
        ("external_dp", 1, 2, 2),
        ("wide_tp", 2, 1, None),
    ]
