"""Combinations that cannot run: each is refused in words that say what is possible."""

from __future__ import annotations

import copy
from functools import cache

import pytest

from ep_ray.config import schema as s
from ep_ray.config.check import arms_of, check, requests_of, router_of, transport_of
from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError

EXPERIMENTS = {"attached_with_url": ("+exp=attached", "arm.url=http://127.0.0.1:1")}


@cache
def composed(*overrides: str) -> s.Config:
    (config,) = compose_all(overrides, multirun=False)
    return config


def config_of(experiment: str, **changes: object) -> s.Config:
    """A shipped experiment with values changed by dotted key (`__` for the dot)."""
    config = copy.deepcopy(composed(*EXPERIMENTS.get(experiment, (f"+exp={experiment}",))))
    for key, value in changes.items():
        *path, leaf = key.split("__")
        node = config
        for part in path:
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        assert hasattr(node, leaf), key
        setattr(node, leaf, value)
    return config


def problems(experiment: str, **changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config_of(experiment, **changes))
    return str(caught.value)


GENERAL = [
    ({"measure": []}, "`measure` is empty: name a2a, serving or both"),
    ({"name": "a b"}, "`name=a b` becomes a folder's name: use letters, digits"),
    ({"name": "../x"}, "`name=../x` becomes a folder's name"),
    ({"name": "-x"}, "`name=-x` becomes a folder's name"),
    ({"repeats": 0}, "`repeats=0`: at least 1"),
    (
        {"transport__env": {"PATH": "x"}},
        "`transport.env.PATH`: only NCCL_, FI_, UCX_, GLOO_, VLLM_ variables are recorded",
    ),
    (
        {"arm__transport": s.Transport(env={"LD_PRELOAD": "x"})},
        "`transport of arm external_dp.env.LD_PRELOAD`: only NCCL_",
    ),
]
WORKLOAD = [
    ({"workload__topk": 17}, "`workload.topk=17`: from 1 to workload.experts=16"),
    ({"workload__topk": 0}, "`workload.topk=0`: from 1 to workload.experts=16"),
    (
        {"workload__hidden": 1000},
        "`workload.hidden=1000`: a multiple of 128, the columns that share one scale, for example "
        "1024",
    ),
    ({"workload__ep": []}, "`workload.ep` is empty: name at least one value"),
    (
        {"workload__ep": [3]},
        "`workload.ep=3`: workload.experts=16 must divide evenly over ranks; "
        "possible: 1, 2, 4, 8, 16",
    ),
    ({"workload__ep": [0]}, "`workload.ep=0`: workload.experts=16 must divide"),
    ({"workload__ep": [2, 4, 2]}, "`workload.ep` names 2 twice: each cell runs once"),
    (
        {"workload__routing": [s.RoutingKind.zipf, s.RoutingKind.zipf]},
        "`workload.routing` names zipf twice",
    ),
    (
        {"workload__routing": [s.RoutingKind.one_hot], "workload__ep": [8]},
        "`workload.routing=one_hot` at EP8: all 4 experts of a token lie on one rank, which "
        "holds 2; raise workload.experts or lower workload.topk",
    ),
    ({"workload__phases": {"x": s.Phase(0, 1)}}, "`workload.phases.x`: tokens and iterations"),
    ({"workload__phases": {"x": s.Phase(1, 0)}}, "`workload.phases.x`: tokens and iterations"),
    (
        {"transport__kind": s.TransportKind.ib, "backend__name": "gloo"},
        "`transport` asks for transport=ib, which gloo cannot have; allowed: auto, tcp",
    ),
    (
        {"against__backends": {"a/b": s.Backend("nccl")}},
        "backend `a/b`: use letters, digits",
    ),
]
SERVING = [
    ({"arm__name": "wide_tp"}, "two arms are called `wide_tp`: give each its own `name`"),
    ({"arm__name": "a/b"}, "arm `a/b` names actors and log files: use letters, digits"),
    (
        {"arm__dp": 4},
        "`arm.ep=2`: with EP on, vLLM spreads experts over tp x dp = 1 x 4 = 4; set arm.ep=4",
    ),
    ({"arm__tp": 0}, "`arm`: tp=0 and dp=2 are at least 1"),
    (
        {"load__rate": [2.0]},
        "`load.rate=[2.0]` with load.arrival=closed, which has no rate: choose load.arrival=",
    ),
    (
        {"load__arrival": s.ArrivalKind.poisson},
        "`load.rate` is empty: load.arrival=poisson needs requests per second",
    ),
    (
        {"load__arrival": s.ArrivalKind.ramp, "load__rate": [0.0]},
        "`load.rate=0.0`: a number above 0",
    ),
    (
        {"load__arrival": s.ArrivalKind.ramp, "load__rate": [float("nan")]},
        "`load.rate=nan`: a number above 0",
    ),
    (
        {"load__arrival": s.ArrivalKind.ramp, "load__rate": [1.0, 1.0]},
        "`load.rate` names 1.0 twice",
    ),
    (
        {"load__arrival": s.ArrivalKind.poisson, "load__rate": [1.0], "load__burstiness": 0.5},
        "`load.burstiness=0.5`: only load.arrival=gamma reads it",
    ),
    (
        {"load__arrival": s.ArrivalKind.gamma, "load__rate": [1.0], "load__burstiness": -1.0},
        "`load.burstiness=-1.0`: a number above 0",
    ),
    (
        {"load__arrival": s.ArrivalKind.ramp, "load__rate": [1.0], "load__ramp_from": 0.0},
        "`load.ramp_from=0.0`: above 0, at most 1",
    ),
    (
        {"load__arrival": s.ArrivalKind.ramp, "load__rate": [1.0], "load__duration_s": 0.0},
        "`load.duration_s=0.0`: a number above 0",
    ),
    ({"load__sessions": -1}, "`load.sessions=-1`: at least 0"),
    ({"load__clients": 0}, "`load.clients=0`: at least 1"),
    (
        {"load__clients": 2},  # and one cell has c = 1
        "`load.concurrency=1` with load.clients=2: each client needs a request in flight; lower",
    ),
    (
        {"load__cancel_share": 1.5},
        "`load.cancel_share=1.5`: a share of the measured requests, 0 to 1",
    ),
    (
        {"load__cancel_share": float("nan")},
        "`load.cancel_share=nan`: a share of the measured requests, 0 to 1",
    ),
    (
        {"load__cancel_share": 0.5, "load__cancel_after_tokens": 0},
        "`load.cancel_after_tokens=0`: at least 1",
    ),
    (
        {"load__cancel_share": 0.5},  # after 8 tokens, and one shape asks for 8
        "`load.cancel_after_tokens=8` with load.shapes=128/8: below the completion's length",
    ),
    (
        {"load__cancel_after_tokens": 4},
        "`load.cancel_after_tokens=4` with load.cancel_share=0, which cancels no request: set",
    ),
    (
        {"load__shared_prefix_tokens": 8},
        "`load.shared_prefix_tokens=8` with load.prompts=token_ids: only load.prompts=",
    ),
    (
        {"load__prompts": s.PromptKind.trace, "load__api": s.Api.chat},
        "`load.prompts=trace` with load.api=chat: a trace has lengths and no words",
    ),
    (
        {"load__arrival": s.ArrivalKind.trace, "load__rate": [1.0]},
        "`load.arrival=trace` with load.prompts=token_ids: set load.prompts=trace",
    ),
    (
        {"load__prompts": s.PromptKind.conversations},
        "`load.prompts=conversations` needs load.file=",
    ),
    (
        {"load__prompts": s.PromptKind.conversations, "load__file": "f.json"},
        "`load.shapes=64/16` with load.prompts=conversations, whose file gives the prompts: write "
        "file/16",
    ),
    (
        {"load__file": "f.json"},
        "`load.file=f.json` with load.prompts=token_ids, which reads none: choose load.prompts=",
    ),
    (
        {"load__shapes": ["64/file"]},
        "`load.shapes=64/file` with load.prompts=token_ids: only conversations or trace read",
    ),
    (
        {"load__prompts": s.PromptKind.shared_prefix},
        "`load.shared_prefix_tokens=0`: load.prompts=shared_prefix needs the prefix's length",
    ),
    (
        {"load__prompts": s.PromptKind.shared_prefix, "load__shared_prefix_tokens": 64},
        "`load.shared_prefix_tokens=64` fills the prompt of load.shapes=64/16: below the prompt's",
    ),
    (
        {"arm__router": s.RouterPolicy.session},
        "`arm`: router=session keeps a session at one rank, and load.sessions=0: no request "
        "belongs to one. Set load.sessions=N",
    ),
    ({"router__processes": 0}, "`router.processes=0`: at least 1"),
    (
        {"router__processes": 2, "router__policy": s.RouterPolicy.none},
        "`router.processes=2` with router=none: only ep-ray's own router runs as several "
        "processes; choose router=round_robin, random or session, or leave it out",
    ),
    (
        {"router__processes": 2, "arm__router": s.RouterPolicy.vllm_router},
        "`router.processes=2` with router=none, vllm_router: only ep-ray's own router",
    ),
    (
        {"router__processes": 2, "arm__router": s.RouterPolicy.least_inflight},
        "`router.processes=2` with router=least_inflight: each process sees only the requests",
    ),
    (
        {"router__processes": 2, "router__port": 0},
        "`router.processes=2` with router.port=0: they share a port; name a free one",
    ),
    (
        {"arm__dp": 3, "arm__ep": 3},
        "`arm`: 8 experts of model `tiny-moe` do not divide over EP 3 (tp 1 x dp 3)",
    ),
    ({"arm__enable_ep": False}, "`arm.ep=2` with arm.enable_ep=false: drop one of them"),
    (
        {"against__arms__wide_tp__dp": 2},
        "`against.arms.wide_tp.dp=2`: wide_tp is one engine; use kind external_dp for dp > 1",
    ),
    (
        {"against__arms__wide_tp__transport": s.Transport(s.TransportKind.ib)},
        "`against.arms.wide_tp` asks for transport=ib, which wide_tp cannot have; "
        "allowed: auto, nvlink, shm, tcp",
    ),
    ({"transport__kind": s.TransportKind.efa}, "asks for transport=efa, which wide_tp cannot"),
    ({"arm__dp_local": 2}, "`arm.dp_local=2`: only kind hybrid_dp groups ranks"),
    (
        {"arm__kind": s.ArmKind.hybrid_dp},
        "`arm.dp_local=None`: ranks behind each server must divide dp=2; possible: 1, 2",
    ),
    ({"model__experts": 0}, "model `tiny-moe` is dense, it has no experts"),
    ({"cluster__ranks_per_gpu": 2}, "only over transport=tcp"),
    ({"arm__url": "http://h"}, "`arm.url`: only kind attached measures a running server"),
    ({"arm__rank_urls": ["http://h"]}, "`arm.url`: only kind attached"),
    (
        {"load__shapes": ["4096"]},
        "`load.shapes=4096`: write PROMPT/COMPLETION in tokens, for example 1024/256",
    ),
    ({"load__shapes": ["0/8"]}, "`load.shapes=0/8`: write PROMPT/COMPLETION"),
    (
        {"load__shapes": ["8000/193"]},
        "`load.shapes=8000/193` is longer than model.max_model_len=8192",
    ),
    ({"load__shapes": []}, "`load.shapes` names at least one value"),
    ({"load__concurrency": []}, "`load.concurrency` names at least one value"),
    ({"load__concurrency": [0]}, "`load.concurrency=0`: at least 1"),
    ({"load__concurrency": [4, 4]}, "`load.concurrency` names 4 twice: each cell runs once"),
    ({"load__shapes": ["8/8", "8/8"]}, "`load.shapes` names 8/8 twice"),
    ({"load__min_requests": 0}, "`load.min_requests` and `load.requests_per_slot` are at least 1"),
    ({"model__made": "big"}, "`model.made=big`: allowed: tiny, lite, tiny_dense, null"),
    ({"model__made": None}, "`model.path` is empty: give a folder or a hub id"),
]


@pytest.mark.parametrize(("changes", "problem"), [*GENERAL, *WORKLOAD, *SERVING])
def test_what_cannot_run_is_refused_with_key_and_remedy(changes, problem):
    assert problem in problems("quickstart", **changes)


@pytest.mark.parametrize("url", ["localhost:80", "ftp://host", "http://", "host"])
def test_an_attached_url_must_be_one(url):
    expected = f"`{url}` is no URL: write http://HOST:PORT"
    assert expected in problems("attached_with_url", arm__url=url)
    assert expected in problems("attached_with_url", arm__rank_urls=[url])


def test_attached_needs_a_url_and_no_transport():
    assert "`arm.url` is missing: arm.url=http://HOST:PORT" in problems(
        "attached_with_url", arm__url=None
    )
    assert "which attached cannot have; allowed: auto" in problems(
        "attached_with_url", transport__kind=s.TransportKind.tcp
    )


def test_every_problem_is_listed_at_once():
    text = problems("quickstart", repeats=0, workload__topk=0, load__concurrency=[0])
    assert len(text.splitlines()) == 3


def test_only_what_is_measured_is_checked():
    check(config_of("quickstart", measure=[s.Measure.a2a], load__concurrency=[0]))
    check(config_of("quickstart", measure=[s.Measure.serving], workload__topk=0))


def test_what_lies_on_the_border_is_allowed():
    check(config_of("quickstart", load__shapes=["8000/192"]))
    check(config_of("quickstart", load__cancel_share=1.0, load__cancel_after_tokens=7))
    check(config_of("quickstart", router__port=0))
    session = {"arm__router": s.RouterPolicy.session, "load__sessions": 2}
    check(config_of("quickstart", router__processes=2, **session))
    check(config_of("quickstart", load__clients=4, load__concurrency=[4, 6]))
    # An open loop has no concurrency to split.
    rate = {"load__arrival": s.ArrivalKind.poisson, "load__rate": [1.0]}
    check(config_of("quickstart", load__clients=4, **rate))
    check(config_of("quickstart", workload__topk=16))
    routing = [s.RoutingKind.one_hot]
    check(config_of("quickstart", workload__routing=routing, workload__ep=[4]))


def test_an_arm_takes_its_own_transport_and_router_first():
    config = config_of("external_dp_rdma")
    kinds = {arm.name: transport_of(config, arm).kind.name for arm in arms_of(config)}
    assert kinds == {"external_dp_rdma": "ib", "external_dp_tcp": "tcp", "wide_tp": "auto"}
    routers = {arm.name: router_of(config, arm).name for arm in arms_of(config)}
    assert routers["wide_tp"] == "none"
    assert routers["external_dp_rdma"] == "round_robin"


def test_published_requests_per_cell():
    config = config_of("external_dp_tcp")
    counts = [requests_of(config, c) for c in (1, 4, 8, 16, 32, 64)]
    assert counts == [32, 32, 32, 64, 128, 256]
