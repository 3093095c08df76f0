"""Planning: which trials, in which order, under which names."""

from __future__ import annotations

import copy
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache

import pytest

from ep_ray.config import schema as s
from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError
from sweeps.driver import arrivals_of
from sweeps.plan import plan
from sweeps.trial import A2aTrial, ServingTrial, Trial

CUDA, CPU = s.DeviceKind.cuda, s.DeviceKind.cpu


@cache
def composed(*overrides: str) -> s.Config:
    (config,) = compose_all(overrides, multirun=False)
    return config


def quick(**changes: object) -> s.Config:
    """The quickstart with values changed by dotted key (`__` for the dot)."""
    config = copy.deepcopy(composed("+exp=quickstart"))
    for key, value in changes.items():
        *path, leaf = key.split("__")
        node = config
        for part in path:
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        assert hasattr(node, leaf), key
        setattr(node, leaf, value)
    return config


def ids(trials: Sequence[Trial]) -> list[str]:
    return [trial.trial_id for trial in trials]


def arm_cells(trials: Sequence[Trial]) -> list[tuple[str, str, int]]:
    return [(trial.arm, trial.cell, trial.repeat) for trial in trials]


def test_cells_of_the_quickstart_in_order():
    trials = plan(quick(), CPU)
    assert arm_cells(trials) == [
        ("gloo", "decode-t32-ep2-uniform", 0),
        ("gloo", "prefill-t256-ep2-uniform", 0),
        ("gloo", "decode-t32-ep4-uniform", 0),
        ("gloo", "prefill-t256-ep4-uniform", 0),
        *[
            (arm, f"{shape}-c{c}", 0)
            for arm in ("external_dp", "wide_tp")
            for shape in ("64-16", "128-8")
            for c in (1, 4, 8)
        ],
    ]


def test_values_of_an_all_to_all_trial():
    trial = plan(quick(), CPU)[1]
    assert isinstance(trial, A2aTrial)
    assert (trial.measure, trial.phase, trial.ep) == ("a2a", "prefill", 2)
    assert (trial.tokens, trial.iterations, trial.routing.name) == (256, 50, "uniform")
    assert trial.backend == s.Backend("gloo")


def test_values_of_a_serving_trial():
    trial = plan(quick(), CPU)[6]
    assert isinstance(trial, ServingTrial)
    assert (trial.measure, trial.arm, trial.shape) == ("serving", "external_dp", "64/16")
    assert (trial.prompt_tokens, trial.completion_tokens) == (64, 16)
    assert (trial.concurrency, trial.requests, trial.gpus) == (8, 24, 2)
    assert trial.router is s.RouterPolicy.round_robin


def test_a_running_server_takes_no_gpus():
    trial = plan(composed("+exp=attached", "arm.url=http://h:1"), CPU)[0]
    assert isinstance(trial, ServingTrial)
    assert trial.gpus == 0


@pytest.mark.parametrize(("device", "name"), [(CPU, "gloo"), (CUDA, "nccl")])
def test_backend_auto_is_what_the_device_has(device, name):
    trial = plan(quick(), device)[0]
    assert isinstance(trial, A2aTrial)
    assert (trial.arm, trial.backend.name) == (name, name)


def test_a_backend_against_is_called_by_its_key():
    against = {"tuned": s.Backend("nccl", {"x": 1})}
    trials = plan(quick(against__backends=against, workload__ep=[2]), CUDA)
    backends = [(t.arm, t.backend.name) for t in trials if isinstance(t, A2aTrial)]
    assert backends == [("nccl", "nccl")] * 2 + [("tuned", "nccl")] * 2


def test_a_backend_against_itself_is_refused():
    config = quick(against__backends={"gloo": s.Backend("gloo")})
    with pytest.raises(ConfigError, match=r"two backends are called `gloo` \(backend=auto is"):
        plan(config, CPU)
    names = {t.arm for t in plan(config, CUDA) if isinstance(t, A2aTrial)}
    assert names == {"nccl", "gloo"}


def test_repeats_are_mirrored_blocks():
    trials = plan(quick(repeats=3), CPU)
    blocks = [(t.arm, t.repeat) for t in trials if t.measure == "serving"]
    assert list(dict.fromkeys(blocks)) == [
        ("external_dp", 0), ("wide_tp", 0),
        ("wide_tp", 1), ("external_dp", 1),
        ("external_dp", 2), ("wide_tp", 2),
    ]  # fmt: skip
    assert Counter(blocks) == dict.fromkeys(blocks, 6)


def test_mirrored_backends_of_an_ep_size_are_neighbours():
    config = quick(against__backends={"b": s.Backend("gloo")}, repeats=2, measure=[s.Measure.a2a])
    order = [(t.repeat, t.cell.split("-")[2], t.arm) for t in plan(config, CPU)]
    assert list(dict.fromkeys(order)) == [
        (0, "ep2", "gloo"), (0, "ep2", "b"), (0, "ep4", "gloo"), (0, "ep4", "b"),
        (1, "ep2", "b"), (1, "ep2", "gloo"), (1, "ep4", "b"), (1, "ep4", "gloo"),
    ]  # fmt: skip


def test_ids_are_unique_and_the_same_every_time():
    config = quick(repeats=2)
    first, again = ids(plan(config, CPU)), ids(plan(copy.deepcopy(config), CPU))
    assert first == again
    assert len(set(first)) == len(first) == 32


def test_ids_of_a_repeat_do_not_depend_on_how_many_there_are():
    of_three = [t for t in plan(quick(repeats=3), CPU) if t.repeat == 0]
    assert sorted(ids(of_three)) == sorted(ids(plan(quick(), CPU)))


def test_an_id_tells_its_arm_cell_and_repeat_apart_from_its_hash():
    trial = plan(quick(), CPU)[0]
    prefix = "a2a.gloo.decode-t32-ep2-uniform.r0."
    assert trial.trial_id == prefix + trial.config_hash[:12]


def test_planning_looks_at_nothing_outside(monkeypatch):
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("planning is pure")

    config, before = quick(repeats=2), json.dumps(as_plain(quick(repeats=2)))
    for module, name in ((time, "time"), (time, "time_ns"), (os, "urandom"), (os, "getenv")):
        monkeypatch.setattr(module, name, forbidden)
    monkeypatch.setattr("builtins.open", forbidden)
    monkeypatch.setattr("socket.socket", forbidden)
    trials = plan(config, CPU)
    monkeypatch.undo()
    assert len(trials) == 32
    assert json.dumps(as_plain(config)) == before, "planning changed the configuration"


def as_plain(node: object) -> object:
    if is_dataclass(node):
        return {f.name: as_plain(getattr(node, f.name)) for f in fields(node)}
    return str(node)


def test_a_large_sweep_is_planned_whole():
    config = quick(repeats=100, load__concurrency=list(range(1, 61)))
    trials = plan(config, CPU)
    assert len(set(ids(trials))) == len(trials) == 100 * (4 + 2 * 2 * 60)


CHANGES_A2A = [
    {"seed": 1},
    {"transport__interface": "eth0"},
    {"transport__env": {"NCCL_X": "1"}},
    {"backend__options": {"x": 1}},
    {"workload__hidden": 2048},
    {"workload__experts": 32},
    {"workload__topk": 2},
    {"workload__dispatch_dtype": s.Dtype.bf16},
    {"workload__combine_dtype": s.Dtype.fp8},
    {"workload__min_warmup": 21},
    {"workload__max_warmup": 501},
    {"workload__warmup_tolerance": 0.03},
    {"workload__check": False},
    {"workload__phases__decode__iterations": 201},
    {"workload__routing_file": "choices.npy"},
    {"workload__masked_share": 0.1},
    {"workload__tokens_per_rank": "ragged"},
    {"workload__local_tp": 2},
    {"workload__compat": s.CompatKind.nccl_tests},
    {"workload__split": True},
    {"workload__overlap_us": 50.0},
]
CHANGES_SERVING = [
    {"seed": 1},
    {"transport__kind": s.TransportKind.tcp},
    {"router__policy": s.RouterPolicy.none},
    {"router__policy": s.RouterPolicy.vllm_router},
    {"router__processes": 2},
    {"model__dtype": "float16"},
    {"model__max_model_len": 4096},
    {"model__revision": "x"},
    {"load__api": s.Api.chat},
    {"load__warmups": 5},
    {"load__calibration": 0},
    {"load__ignore_eos": False},
    {"load__temperature": 0.5},
    {"load__min_requests": 9},
    {"load__sessions": 2},
    {"load__cancel_share": 0.5},
    {"load__cancel_after_tokens": 4},
    {"load__clients": 2},
    {"load__prompts": s.PromptKind.text},
    {"load__shared_prefix_tokens": 16},
    {"load__file": "talks.json"},
    {"load__arrival": s.ArrivalKind.poisson, "load__rate": [1.0]},
    {"load__burstiness": 2.0},
    {"load__ramp_from": 0.5},
    {"arm__tp": 2},
    {"arm__dp": 3},
    {"arm__enable_ep": False},
    {"arm__all2all_backend": "naive"},
    {"arm__max_num_seqs": 17},
    {"arm__gpu_memory_utilization": 0.8},
    {"arm__kv_cache_gib": 2},
    {"arm__enforce_eager": False},
    {"arm__extra_args": ["--x"]},
    {"arm__env": {"VLLM_X": "1"}},
    {"arm__url": "http://h:1"},
]
SAME = [
    {"name": "other"},
    {"repeats": 5},
    {"results": "elsewhere"},
    {"resume": "x"},
    {"plan_only": True},
    {"cluster__name": "other"},
    {"cluster__gpus": 8},
    {"cluster__dashboard": False},
    {"cluster__placement_timeout_s": 1.0},
    {"cluster__device": s.DeviceKind.auto},
    {"deadlines__trial_s": 1.0},
    {"router__port": 1},
    {"router__executable": "/x/vllm-router"},
    {"arm__vllm_port": 1},
    {"arm__api_port": 1},
    {"arm__rpc_port": 1},
    {"arm__startup_timeout_s": 1.0},
    {"arm__transport": s.Transport()},
    {"arm__router": s.RouterPolicy.round_robin},
    {"load__request_timeout_s": 1.0},
    {"load__concurrency": [1]},
    {"load__requests_per_slot": 1},
    {"load__duration_s": 1.0},
    {"workload__zipf_exponent": 2.0},
    {"against__arms": {}},
]


def first_hashes(config: s.Config, device: s.DeviceKind = CPU) -> dict[str, str]:
    """Hash of the first trial of each measure: decode at EP2, and 64/16 at c = 1."""
    found: dict[str, str] = {}
    for trial in plan(config, device):
        found.setdefault(trial.measure, trial.config_hash)
    return found


def label(change: dict[str, object]) -> str:
    return ",".join(change)


@pytest.mark.parametrize("change", CHANGES_A2A, ids=label)
def test_what_changes_an_all_to_all_result_changes_its_hash(change):
    assert first_hashes(quick(**change))["a2a"] != first_hashes(quick())["a2a"]


@pytest.mark.parametrize("change", CHANGES_SERVING, ids=label)
def test_what_changes_a_serving_result_changes_its_hash(change):
    assert first_hashes(quick(**change))["serving"] != first_hashes(quick())["serving"]


@pytest.mark.parametrize("change", SAME, ids=label)
def test_what_changes_no_result_leaves_the_hashes(change):
    assert first_hashes(quick(**change)) == first_hashes(quick())


def test_the_device_counts_whether_it_was_asked_for_or_found():
    auto = s.DeviceKind.auto
    assert first_hashes(quick(cluster__device=auto), CUDA) == first_hashes(quick(), CUDA)
    both = first_hashes(quick(), CPU), first_hashes(quick(), CUDA)
    assert both[0]["serving"] != both[1]["serving"]
    assert both[0]["a2a"] != both[1]["a2a"]


def test_masked_gpus_count_where_there_are_gpus():
    masked = quick(cluster__mask_gpus=True)
    assert first_hashes(masked, CUDA)["a2a"] != first_hashes(quick(), CUDA)["a2a"]
    assert first_hashes(masked, CPU) == first_hashes(quick(), CPU)


def test_the_exponent_counts_for_zipf_routing():
    zipf = {"workload__routing": [s.RoutingKind.zipf]}
    flat, steep = quick(**zipf), quick(**zipf, workload__zipf_exponent=2.0)
    assert first_hashes(flat)["a2a"] != first_hashes(steep)["a2a"]


def test_every_key_of_the_schema_is_judged_by_these_tests():
    """A key that is added to the schema must be put into one of the lists above."""
    judged = {key for change in [*CHANGES_A2A, *CHANGES_SERVING, *SAME] for key in change}
    for section in ("workload", "arm", "load", "transport"):
        names = {f.name for f in fields(getattr(quick(), section))}
        known = {key.split("__")[1] for key in judged if key.startswith(f"{section}__")}
        assert names - known == UNJUDGED[section]


# Names and cells, which are in the id; the rest goes with a key that is judged.
UNJUDGED = {
    "workload": {"ep", "routing", "launch"},
    "arm": {"name", "kind", "ep", "dp_local", "rank_urls"},
    "load": {"shapes"},
    "transport": {"nics_per_gpu"},
}


def test_the_readable_configuration_is_complete():
    for trial in plan(quick(), CPU):
        found = json.loads(trial.config_json)
        assert found["cell"] == trial.cell
        if isinstance(trial, ServingTrial):
            assert found["arm"]["arm"]["vllm_port"] == trial.layout.vllm_port
            assert found["arm"]["load"]["min_requests"] == 8
            assert found["more"] == {"requests": trial.requests}
        else:
            assert found["arm"]["workload"]["hidden"] == 1024
            assert found["arm"]["backend"]["name"] == "gloo"


def test_a_phase_with_an_odd_name_still_gives_json():
    config = quick(workload__phases={'de"code': s.Phase(1, 1)}, measure=[s.Measure.a2a])
    assert json.loads(plan(config, CPU)[0].config_json)["cell"] == 'de"code-t1-ep2-uniform'


def test_an_open_loop_has_a_cell_for_each_rate_and_as_many_requests_as_arrive():
    open_loop = {"load__arrival": s.ArrivalKind.poisson, "load__rate": [0.5, 8.0]}
    config = quick(**open_loop, load__shapes=["64/16"], load__duration_s=10.0)
    trials = [t for t in plan(config, CPU) if isinstance(t, ServingTrial)]
    found = {(t.cell, t.concurrency, t.rate_per_s, t.requests) for t in trials}
    assert found == {("64-16-q0.5", 0, 0.5, 8), ("64-16-q8", 0, 8.0, 80)}
    assert {t.arrival for t in trials} == {s.ArrivalKind.poisson}
    # Arms are compared in pairs: the same requests arrive at the same times.
    times = [arrivals_of(t, config) for t in trials if t.rate_per_s == 8.0]
    assert times[0] == times[1]
    assert len(times[0] or []) == 80
    again = quick(**open_loop, load__shapes=["64/16"], load__duration_s=10.0, repeats=2)
    repeats = [t for t in plan(again, CPU) if isinstance(t, ServingTrial) and t.rate_per_s == 8.0]
    assert arrivals_of(repeats[0], again) != arrivals_of(repeats[-1], again)
