"""All-to-all workloads that cannot be, by the command lines that ask for them."""

from __future__ import annotations

import json

import pytest

from ep_ray.backends import registry
from ep_ray.backends.base import Spec
from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import DeviceKind
from sweeps.outcome import Outcome, trial_row
from sweeps.plan import plan
from sweeps.tables import TRIALS
from sweeps.trial import A2aTrial

BAD = {
    "workload.masked_share=1.5": "a share from 0 to 1",
    "workload.tokens_per_rank=random": "uniform, ragged, or a list of integers",
    "workload.tokens_per_rank=[1,2,3]": "has 3 numbers, EP2 needs 2",
    "workload.tokens_per_rank=[1,33] workload.ep=[2]": "each from 0 to a phase's tokens, 32",
    "workload.local_tp=0": "at least 1",
    "workload.phases={}": "write ~workload.phases.decode ~workload.phases.prefill",
    "~workload.phases.decode ~workload.phases.prefill": "`workload.phases` is empty",
    "workload.local_tp=2 workload.ep=[1]": "does not divide EP1 into groups",
    "workload.local_tp=2 workload.phases.decode.tokens=3 workload.ep=[2]": "does not divide the 3",
    "workload.local_tp=2 workload.tokens_per_rank=ragged": "have equal parts of it",
    "workload.routing=[file]": "needs workload.routing_file=PATH",
    "workload.routing_file=x.npy": "is not read unless workload.routing names file",
    "workload.launch=[graph]": "CUDA graphs need CUDA; use eager",
    "workload.launch=[]": "`workload.launch` is empty",
    "workload.launch=[eager,eager]": "names eager twice",
    "workload.overlap_us=0": "above 0, at most 1000000, or null",
    "workload.overlap_us=nan": "above 0, at most 1000000, or null",
    "workload.overlap_us=inf": "above 0, at most 1000000, or null",
    "workload.max_warmup=-1": "neither is below 0",
    "workload.max_warmup=5": "the most is not below the fewest",
    "workload.warmup_tolerance=nan": "a number, not below 0",
    "workload.zipf_exponent=-1": "a number, not below 0",
    "workload.overlap_us=5 workload.compat=uccl": "that benchmark has no such operation",
    "workload.compat=nccltests": "nccl_tests",
}


@pytest.mark.parametrize("asked", BAD)
def test_a_workload_that_cannot_be_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + BAD[asked].replace("(", r"\(")):
        compose_all(["+exp=a2a_variants", *asked.split(" ")], multirun=False)


def trials(*overrides: str, device: DeviceKind = DeviceKind.cpu) -> list[A2aTrial]:
    (config,) = compose_all(list(overrides), multirun=False)
    return [trial for trial in plan(config, device) if isinstance(trial, A2aTrial)]


def test_variants_are_arms_of_their_own() -> None:
    found = trials("+exp=a2a_variants", "workload.ep=[2]")
    assert [trial.arm for trial in found[::2]] == ["gloo", "gloo_equal", "gloo_padded"]
    auto = trials("+exp=quickstart", "backend=auto", "+backend.options.variant=equal")[0]
    assert (auto.arm, auto.backend.name) == ("gloo_equal", "gloo")


def test_launches_are_cells_of_their_own() -> None:
    found = trials("+exp=a2a_graph", device=DeviceKind.cuda)
    assert [trial.cell for trial in found if trial.arm == "nccl_equal"] == [
        "decode-t128-ep2-uniform",
        "decode-t128-ep2-uniform-graph",
    ]


def test_another_way_of_measuring_is_another_trial_with_its_own_columns() -> None:
    asked = ["workload.compat=nccl_tests", "workload.masked_share=0.1"]
    asked += ["workload.tokens_per_rank=[3,0]", "workload.ep=[2]"]
    usual = trials("+exp=a2a_variants", "workload.ep=[2]")[0]
    trial = trials("+exp=a2a_variants", *asked)[0]
    assert trial.cell == "decode-t32-ep2-uniform-masked0.1-listed-nccl_tests"
    assert trial.config_hash != usual.config_hash
    row = trial_row(trial, "demo", Outcome(), started_ns=0)
    assert set(row) <= set(TRIALS.names)
    assert (row["compat"], row["launch"]) == ("nccl_tests", "eager")
    assert (row["masked_share"], row["tokens_per_rank"]) == (0.1, "[3, 0]")
    assert json.loads(trial.config_json)["arm"]["workload"]["compat"] == "nccl_tests"
    assert trial_row(usual, "demo", Outcome(), started_ns=0)["compat"] is None


def test_refusals_of_graphs_and_uneven_ranks_say_why() -> None:
    def refusals(name: str, variant: str, device: str = "cuda", **asked: bool) -> list[str]:
        point = Spec(ep=2, tokens=4, hidden=128, experts=4, topk=2, device=device, **asked)
        return registry.load(name, {"variant": variant}).capabilities.refusals(point)

    assert refusals("nccl", "exact", graph=True) == [
        "launch=graph: it cannot be captured, it waits for the device on the host; use launch=eager"
    ]
    assert refusals("nccl", "equal", graph=True) == refusals("nccl", "padded", graph=True) == []
    assert refusals("gloo", "equal", "cpu", graph=True) == [
        "launch=graph on device cpu: CUDA graphs need CUDA"
    ]
    assert refusals("nccl", "exact", ragged=True) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "equall"}, "is one of exact, equal, padded. Did you mean 'equal'"),
        ({"variant": "equal", "capacity": 3}, r"\['capacity'\] are unknown to this variant"),
        ({"variant": "padded", "capacity": 0}, "rows per destination rank, at least 1"),
        ({"variant": "padded", "capacity": "many"}, "rows per destination rank, at least 1"),
    ],
)
def test_options_of_variants_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.load("gloo", options)
