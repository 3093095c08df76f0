"""The vllm-router package: where its program is looked for, and what it is told."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import Config, DeviceKind, RouterPolicy
from ep_ray.cores import seats
from serving.ports import router_claims
from serving.router.router import RouterError
from serving.router.vllm_router import WRITTEN_FOR, arguments, find_program, version_of
from sweeps.feasible import check_feasible, ports_of
from sweeps.plan import plan
from sweeps.routers import own_policies, router_cores

URLS = ["http://h:1", "http://h:2"]


def program(folder: Path, name: str = "vllm-router") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_program_beside_this_python_comes_before_that_on_the_path(tmp_path, monkeypatch):
    on_path = program(tmp_path / "path")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    assert find_program(None) == str(on_path)
    beside = program(tmp_path / "venv" / "bin")
    assert find_program(None) == str(beside)


def test_a_named_program_is_taken_by_path_or_by_name(tmp_path, monkeypatch):
    mine = program(tmp_path, "other")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program(str(mine)) == find_program("other") == str(mine)


@pytest.mark.parametrize("asked", [None, "/no/such/program"])
def test_a_missing_program_is_told_with_what_mends_it(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(RouterError) as caught:
        find_program(asked)
    message = str(caught.value)
    assert f"pip install vllm-router=={WRITTEN_FOR}" in message
    assert (asked or str(tmp_path / "vllm-router")) in message
    assert "router.executable=" in message


def test_the_version_is_that_of_the_programs_own_environment(tmp_path):
    info = tmp_path / "lib" / "python3.11" / "site-packages" / "vllm_router-9.8.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: vllm-router\nVersion: 9.8\n")
    assert version_of(str(program(tmp_path / "bin"))) == "9.8"
    assert version_of(str(program(tmp_path / "elsewhere" / "bin"))) == "unknown"


def test_the_command_line_goes_round_and_never_retries():
    given = arguments("127.0.0.1", 1, 2, URLS)
    assert given[given.index("--policy") + 1] == "round_robin"
    assert {"--disable-retries", "--disable-circuit-breaker"} <= set(given)
    assert (given[given.index("--port") + 1], given[given.index("--prometheus-port") + 1]) == (
        "1", "2",
    )  # fmt: skip
    assert given[given.index("--worker-urls") + 1 :] == URLS


def test_the_package_itself_takes_the_command_line():
    args = pytest.importorskip("vllm_router.router_args", reason="needs vllm-router").RouterArgs
    parser = argparse.ArgumentParser()
    args.add_cli_args(parser, use_router_prefix=False)
    found = args.from_cli_args(parser.parse_args(arguments("::1", 1, 2, URLS)))
    assert (found.policy, found.worker_urls, found.host) == ("round_robin", URLS, "::1")
    assert (found.disable_retries, found.disable_circuit_breaker) == (True, True)


@pytest.mark.parametrize(
    ("policies", "ports"),
    [
        ({"none"}, []),
        ({"none", "random", "session"}, [7]),
        ({"vllm_router"}, [8, 9]),
        ({"round_robin", "vllm_router"}, [7, 8, 9]),
    ],
)
def test_each_router_has_ports_of_its_own(policies, ports):
    assert [claim.first for claim in router_claims("h", 7, policies)] == ports


def composed(*overrides: str) -> Config:
    (config,) = compose_all(["+exp=router_cost", *overrides], multirun=False)
    return config


def test_the_three_arms_share_a_server_and_take_turns():
    trials = plan(composed("repeats=2", "load.concurrency=[1]"), DeviceKind.cpu)
    assert {trial.block for trial in trials} == {trials[0].block}
    arms = ["round_robin", "vllm_router", "direct"]
    assert [trial.arm for trial in trials] == [*arms, *arms[::-1]]
    assert {18900, 18901, 18902} <= set(ports_of(composed(), trials))


def test_a_missing_program_is_found_out_before_anything_starts():
    config = composed("router.executable=/no/such")
    with pytest.raises(ConfigError, match=r"router.executable=/no/such; found: no program"):
        check_feasible(config, plan(config, DeviceKind.cpu), DeviceKind.cpu, [], {})


def test_it_is_a_choice_for_a_whole_experiment_too():
    assert composed("router=vllm_router").router.policy is RouterPolicy.vllm_router


def test_routers_that_are_compared_keep_to_a_core():
    every = set(RouterPolicy)
    assert len(router_cores(every)) == 1
    assert router_cores(every, 3) == seats(3)
    assert router_cores(every - {RouterPolicy.vllm_router}, 3) == []
    assert [p.name for p in own_policies(every)] == [
        "least_inflight", "random", "round_robin", "session",
    ]  # fmt: skip


@pytest.mark.parametrize("url", ["http://h:1/rank0", "https://h:1"])
def test_a_router_before_a_running_server_needs_a_plain_url(url):
    attached = ["+exp=attached", "arm.url=http://h:1", f"arm.rank_urls=[{url}]"]
    assert compose_all(attached, multirun=False)
    with pytest.raises(ConfigError, match="a router speaks to http://HOST:PORT, without a path"):
        compose_all([*attached, "arm.router=vllm_router"], multirun=False)
