"""Command line and environment of engines."""

from dataclasses import replace

import pytest

from ep_ray.config.schema import Arm, ArmKind
from serving.engine import Launch, Seat, cpu_binding, plan_launches
from serving.models import ResolvedModel

MODEL = ResolvedModel("tiny", "/m", "sha256:0", "tiny", 1024, (0, 1, 2), 4096, 8)
WIDE = Arm(name="wide", kind=ArmKind.wide_tp, tp=4)
DP = Arm(name="external_dp", kind=ArmKind.external_dp, tp=2, dp=2, enable_ep=True)
DP_SEATS = [Seat("10.0.0.1", (0, 1)), Seat("10.0.0.2", (2, 3))]


def plan(arm: Arm, seats: list[Seat], cpus: list[int] | None = None) -> list[Launch]:
    envs = [{"NCCL_HOSTID": f"h{rank}"} for rank in range(len(seats))]
    return plan_launches(arm, MODEL, "dummy", "bfloat16", seats, envs, cpus)


def value(launch: Launch, flag: str) -> str:
    return launch.argv[launch.argv.index(flag) + 1]


def test_wide_tp_is_one_engine_without_data_parallel_flags() -> None:
    (launch,) = plan(WIDE, [Seat("10.0.0.1", (0, 1, 2, 3))])
    assert value(launch, "--tensor-parallel-size") == "4"
    assert not any("data-parallel" in word or "expert" in word for word in launch.argv)
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_external_dp_ranks_share_rank_zero_and_differ_in_rank() -> None:
    launches = plan(DP, DP_SEATS)
    assert [launch.name for launch in launches] == [
        "engine:external_dp:rank0",
        "engine:external_dp:rank1",
    ]
    for rank, launch in enumerate(launches):
        assert value(launch, "--data-parallel-size") == "2"
        assert value(launch, "--data-parallel-rank") == str(rank)
        assert value(launch, "--data-parallel-address") == "10.0.0.1"
        assert value(launch, "--data-parallel-rpc-port") == "19400"
        assert launch.url == f"http://10.0.0.{rank + 1}:{18000 + rank}"
        assert launch.env["VLLM_HOST_IP"] == f"10.0.0.{rank + 1}"
        assert launch.env["NCCL_HOSTID"] == f"h{rank}"
        assert "--enable-expert-parallel" in launch.argv
    assert launches[1].env["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_cpu_engine_gets_kv_space_and_no_share_of_memory() -> None:
    arm = replace(DP, tp=1, kv_cache_gib=3)
    launches = plan(arm, [Seat("127.0.0.1")] * 2, cpus=[0, 1])
    assert "--gpu-memory-utilization" not in launches[0].argv
    assert launches[0].env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert [launch.env["VLLM_PORT"] for launch in launches] == ["19500", "19530"]


def test_settings_and_extra_arguments_reach_the_engine() -> None:
    arm = replace(DP, enforce_eager=True, extra_args=["--seed", "7"], env={"VLLM_X": "1"})
    launch = plan(arm, DP_SEATS)[0]
    assert launch.argv[-2:] == ("--seed", "7")
    assert "--enforce-eager" in launch.argv
    assert launch.env["VLLM_X"] == "1"


@pytest.mark.parametrize(
    ("cpus", "tp", "ranks", "rank", "expected"),
    [
        ([0, 1], 2, 1, 0, ("0|1", 1)),
        ([0, 1], 1, 2, 1, ("nobind", 1)),
        ([0], 2, 1, 0, ("nobind", 1)),
        ([0, 1, 2, 3, 8, 9, 10, 11], 2, 2, 1, ("8,9|10,11", 2)),
        ([0, 1, 2, 3], 1, 1, 0, ("0,1,2,3", 4)),
    ],
)
def test_cpu_binding(
    cpus: list[int], tp: int, ranks: int, rank: int, expected: tuple[str, int]
) -> None:
    assert cpu_binding(cpus, tp, ranks, rank) == expected


@pytest.mark.parametrize(
    ("arm", "seats", "words"),
    [
        (replace(DP, kind=ArmKind.attached), DP_SEATS, "is attached"),
        (DP, DP_SEATS[:1], "2 servers, but 1 seats"),
        (replace(DP, tp=4), DP_SEATS, "its layout needs 4"),
        (DP, [Seat("127.0.0.1", (0, 1)), DP_SEATS[1]], "loopback"),
        (replace(DP, env={"VLLM_PORT": "1"}), DP_SEATS, "comes from arm.vllm_port"),
        (replace(DP, extra_args=["--max_num_seqs=4"]), DP_SEATS, "repeats --max-num-seqs"),
    ],
)
def test_what_cannot_be_launched_is_refused(arm: Arm, seats: list[Seat], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(arm, seats)
