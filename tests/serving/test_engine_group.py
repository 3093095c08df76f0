"""Engines for real: vLLM on the CPU under Ray, from start to the last process.

One data-parallel group is started for the whole module, and loses a race for its ports at first:
what its tests show, a restarted group does. Its last test kills a rank.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from ep_ray.config.schema import Arm, ArmKind, Model
from serving import engine_http, models, ports
from serving.deploy import deploy
from serving.engine import Launch, Seat, plan_launches
from serving.engine_process import session_pids
from serving.group import EngineGroup, GroupError

pytest.importorskip("vllm", reason="needs vLLM")
HOST = "127.0.0.1"
STARTUP_S = 360.0
DEADLINE_S = 60.0
THIEF = Path(__file__).with_name("port_thief.py")
SLEEPS = ("-c", "import time; time.sleep(600)")
MODEL = Model(name="tiny", made="tiny", load_format="dummy", max_model_len=2048)
EXTERNAL_DP = Arm(
    name="external_dp", kind=ArmKind.external_dp, dp=2, enable_ep=True, enforce_eager=True
)
WIDE_TP = Arm(name="wide_tp", kind=ArmKind.wide_tp, tp=2, enforce_eager=True)
ONE = replace(WIDE_TP, name="one", tp=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    mine = not ray.is_initialized()
    if mine:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        ray.init(num_cpus=2, include_dashboard=False, logging_level="warning")
    yield
    if mine:
        ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def on_free_ports(arm: Arm) -> Arm:
    """The arm on a stretch of ports that nobody uses now, for several runs share a machine."""
    for _ in range(200):
        base = random.randrange(21000, 31000, 100)
        if all(map(ports.is_free, range(base, base + 100))):
            return replace(arm, api_port=base, rpc_port=base + 20, vllm_port=base + 30)
    raise RuntimeError("no 100 free ports in a row between 21000 and 31000")


def plan(arm: Arm, folder: Path) -> tuple[list[Launch], list[Seat]]:
    model = models.resolve(MODEL, folder)
    seats = [Seat(HOST, options={"num_cpus": 1}) for _ in range(arm.dp)]
    ports.check_map(ports.port_map(arm, [HOST] * arm.dp), ports.ephemeral_range())
    cpus = sorted(os.sched_getaffinity(0))[:2]
    return plan_launches(
        arm, model, MODEL.load_format, MODEL.dtype, seats, [{}] * arm.dp, cpus
    ), seats


def start(arm: Arm, folder: Path, **changes: object) -> EngineGroup:
    launches, seats = plan(on_free_ports(arm), folder)
    launches = [replace(launch, **changes) for launch in launches]  # type: ignore[arg-type]
    return deploy(launches, seats, str(folder), STARTUP_S)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


def sessions(group: EngineGroup) -> list[int]:
    return [started.session for started in group._started if started is not None]


def assert_nothing_left(found: list[int], launches: list[Launch]) -> None:
    assert [session_pids(session) for session in found] == [[] for _ in found]
    taken = [claim.first for launch in launches for claim in launch.claims if not claim.probed]
    assert ports.wait_free(taken, 0.0) == []


def robbed(launch: Launch, folder: Path) -> Launch:
    """The rank with its probed ports taken, at its first start, between probing and binding."""
    site = folder / "thief"
    site.mkdir()
    shutil.copy(THIEF, site / "sitecustomize.py")
    (window,) = [claim for claim in launch.claims if claim.probed]
    env = {
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).strip(":"),
        "PORT_THIEF_WINDOW": f"{window.first}-{window.last}",
        "PORT_THIEF_MARK": str(folder / "robbed"),
    }
    return replace(launch, env={**launch.env, **env})


@pytest.fixture(scope="module")
def group(cluster: None, folder: Path) -> Iterator[EngineGroup]:
    launches, seats = plan(on_free_ports(EXTERNAL_DP), folder)
    up = deploy([robbed(launches[0], folder), launches[1]], seats, str(folder), STARTUP_S)
    yield up
    up.stop(grace_s=0.0)


@pytest.mark.timeout(800)
def test_group_that_lost_a_race_for_a_port_serves_after_one_restart(
    group: EngineGroup, folder: Path
) -> None:
    assert (folder / "robbed").exists()
    assert group.restarted_for is not None
    assert re.search(r"rank0 found its port taken: .*(EADDRINUSE|Errno 98)", group.restarted_for)
    # Both ranks were started twice: what is left of the first start in their logs, they add to.
    for rank in range(EXTERNAL_DP.dp):
        log = (folder / f"engine-external_dp-rank{rank}.log").read_text(errors="replace")
        assert log.count("non-default args:") == 2
    group.check_alive()


def test_ranks_of_one_group_answer_and_are_counted_apart(group: EngineGroup) -> None:
    before = group.counters(DEADLINE_S)
    first, second = group.endpoints
    for endpoint, count in ((first, 3), (second, 1)):
        for token in range(count):
            engine_http.generate_one_token(endpoint.url, MODEL.name, 10 + token, DEADLINE_S)
    after = group.counters(DEADLINE_S)
    for endpoint, count in ((first, 3), (second, 1)):
        assert after[endpoint.name].complete - before[endpoint.name].complete == count
        assert after[endpoint.name].e2e_count - before[endpoint.name].e2e_count == count
        assert after[endpoint.name].failed == after[endpoint.name].running == 0
    group.check_alive()


def test_request_that_its_client_drops_is_not_complete(group: EngineGroup) -> None:
    before = group.counters(DEADLINE_S)
    endpoint = group.endpoints[0]
    connection = http.client.HTTPConnection(endpoint.url.removeprefix("http://"), timeout=60)
    body = {"model": MODEL.name, "prompt": [5], "max_tokens": 2000, "stream": True}
    body |= {"ignore_eos": True}
    as_json = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), as_json)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    assert response.read(1)
    until(lambda: engine_http.counters(endpoint.url).running == 1)
    response.close()
    connection.close()
    after = group.counters(DEADLINE_S)
    assert after[endpoint.name].complete == before[endpoint.name].complete


def test_facts_tell_what_really_runs(group: EngineGroup) -> None:
    first, second = group.facts()
    assert first.vllm_version[0].isdigit()
    assert "--enable-expert-parallel" in first.command
    assert second.command[second.command.index("--data-parallel-rank") + 1] == "1"
    base = int(first.environment["VLLM_PORT"])
    assert int(second.environment["VLLM_PORT"]) == base + ports.PROBE_WINDOW
    assert 0 < first.health_s <= first.startup_s
    assert all("startup complete" in log for log in group.log_tails(200).values())


def test_second_group_on_the_same_ports_is_refused(group: EngineGroup, folder: Path) -> None:
    launches = [replace(launch, name=f"again:{launch.rank}") for launch in group.launches]
    seats = [Seat(HOST, options={"num_cpus": 0}) for _ in launches]
    with pytest.raises(GroupError, match=r"ports are taken.*\n.*arm\.api_port="):
        deploy(launches, seats, str(folder), STARTUP_S)
    group.check_alive()


def test_death_of_a_rank_ends_the_group_without_a_trace(group: EngineGroup) -> None:
    """Last of the group's tests."""
    found, launches = sessions(group), group.launches
    assert all(len(session_pids(session)) > 2 for session in found)
    os.kill(group.facts()[1].pid, signal.SIGKILL)
    with pytest.raises(GroupError, match=r"rank1 ended with exit code 137 \(signal 9\)"):
        group.watch(lambda: False, DEADLINE_S, interval_s=0.05)
    assert group.stop(grace_s=5.0) == []
    assert_nothing_left(found, launches)


@pytest.mark.timeout(500)
def test_killed_actor_leaves_no_engine(cluster: None, folder: Path) -> None:
    up = start(WIDE_TP, folder)
    found, launches = sessions(up), up.launches
    assert len(session_pids(found[0])) >= 4  # supervisor, server, engine core, workers
    ray.kill(up._actors[0])
    until(lambda: not session_pids(found[0]))
    with pytest.raises(GroupError, match="its actor is gone"):
        up.check_alive()
    assert up.stop() == []
    assert_nothing_left(found, launches)


def test_refused_flag_is_reported_with_the_log(cluster: None, folder: Path) -> None:
    arm = replace(ONE, extra_args=["--no-such-flag"])
    with pytest.raises(GroupError, match=r"(?s)rank0 ended with exit code 2.*--no-such-flag"):
        start(arm, folder)


def test_engine_that_hangs_ends_at_the_deadline(cluster: None, folder: Path) -> None:
    launches, seats = plan(on_free_ports(ONE), folder)
    launches = [replace(launch, argv=SLEEPS) for launch in launches]
    with pytest.raises(GroupError, match=r"rank0 is not healthy after \d s"):
        deploy(launches, seats, str(folder), startup_timeout_s=5.0)
    # The name is free again: nothing of the first group is left in Ray.
    with pytest.raises(GroupError, match=r"rank0 is not healthy after \d s"):
        deploy(launches, seats, str(folder), startup_timeout_s=3.0)


def test_first_rank_to_die_is_the_reason(cluster: None, folder: Path) -> None:
    launches, seats = plan(on_free_ports(EXTERNAL_DP), folder)
    dies = ("-c", "import sys; sys.exit('out of experts')")
    launches = [replace(launches[0], argv=SLEEPS), replace(launches[1], argv=dies)]
    with pytest.raises(
        GroupError, match=r"(?s)rank1 ended with exit code 1.*out of experts"
    ) as caught:
        deploy(launches, seats, str(folder), STARTUP_S)
    assert caught.value.port_race is None
    log = (folder / "engine-external_dp-rank1.log").read_text()
    assert log.count("out of experts") == 1  # no other failure is tried again


def test_group_that_loses_its_race_twice_is_not_started_thrice(
    cluster: None, tmp_path: Path
) -> None:
    launches, seats = plan(on_free_ports(ONE), tmp_path)
    collides = "import socket; a = socket.create_server(('127.0.0.1', 0)); "
    collides += "print('starts', flush=True); socket.create_server(a.getsockname())"
    launches = [replace(launches[0], argv=("-c", collides))]
    again = r"(?s)^started once more, for it had lost a race for a port: engine:one:rank0 found "
    again += r"its port taken: OSError: \[Errno 98\].*engine:one:rank0 ended with exit code 1"
    with pytest.raises(GroupError, match=again):
        deploy(launches, seats, str(tmp_path), STARTUP_S)
    assert (tmp_path / "engine-one-rank0.log").read_text().count("starts\n") == 2


def test_server_that_answers_health_only_is_not_ready(cluster: None, folder: Path) -> None:
    """As a hung collective does: `/health` is 200 and no token ever comes."""
    launches, seats = plan(on_free_ports(ONE), folder)
    mute = f"""
import http.server, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        time.sleep(600)
http.server.ThreadingHTTPServer(("{HOST}", {launches[0].port}), Handler).serve_forever()
"""
    launches = [replace(launches[0], argv=("-c", mute))]
    with pytest.raises(GroupError, match="is healthy, but gave no token: timed out"):
        deploy(launches, seats, str(folder), startup_timeout_s=4.0)


def test_actor_without_a_place_is_reported(cluster: None, folder: Path) -> None:
    launches, _ = plan(on_free_ports(ONE), folder)
    seats = [Seat(HOST, options={"resources": {"nowhere": 1}})]
    with pytest.raises(GroupError, match=r"did not answer 'start' within 1 s\nRay may have no pl"):
        deploy(launches, seats, str(folder), STARTUP_S, actor_start_s=1.0)


def test_port_of_a_stranger_is_named_before_anything_starts(cluster: None, folder: Path) -> None:
    launches, seats = plan(on_free_ports(ONE), folder)
    with socket.create_server((HOST, launches[0].port)):
        with pytest.raises(GroupError, match=rf"port {launches[0].port} .*arm\.api_port="):
            deploy(launches, seats, str(folder), STARTUP_S)
