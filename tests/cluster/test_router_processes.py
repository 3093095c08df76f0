"""A router of two processes on one port, each a Ray actor: sums, death, strangers on the port."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from ep_ray.config.compose import compose_all
from ep_ray.config.schema import Config, RouterPolicy
from ep_ray.watchdog import TrialError
from serving import ports
from serving.null_engine import running
from serving.null_server import Pace
from sweeps.routers import OwnRouter
from tests.sweep_process import free_ports

CONNECTIONS, EACH = 32, 3
DEADLINE_S = 60.0
BODY = json.dumps({"prompt": [1, 2], "max_tokens": 2, "model": "m"})


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[tuple[str, str]]]:
    """Two null engines: name and URL."""
    pace = Pace(ttft_ns=0, itl_ns=0)
    with running(pace) as one, running(pace) as other:
        yield [("rank0", one.url), ("rank1", other.url)]


def config_of(port: int) -> Config:
    (config,) = compose_all(
        ["+exp=attached", "arm.url=http://127.0.0.1:1", "arm.router=round_robin",
         f"router.port={port}", "router.processes=2"], multirun=False,
    )  # fmt: skip
    return config


@contextlib.contextmanager
def router_of(ranks: list[tuple[str, str]], port: int, name: str) -> Iterator[OwnRouter]:
    policies = [RouterPolicy.round_robin, RouterPolicy.session]
    router = OwnRouter(config_of(port), name, policies, ranks, {"dp": 2}, [])
    try:
        yield router
    finally:
        router.close()
    assert ports.is_free(port)


def send(port: int, connections: int = CONNECTIONS, **headers: str) -> Counter[str]:
    """Requests over kept-alive connections; how many each rank answered, as the router says."""
    seen: Counter[str] = Counter()
    for _ in range(connections):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        for _ in range(EACH):
            connection.request("POST", "/v1/completions", BODY, headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            seen[answer.headers["x-ep-ray-endpoint"]] += 1
        connection.close()
    return seen


def documents(port: int) -> dict[str, dict[str, Any]]:
    """Each process's own document, as `GET /status` gives that of whichever the kernel chose."""
    found: dict[str, dict[str, Any]] = {}
    for _ in range(500):
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/status", timeout=DEADLINE_S
        ) as answer:
            document = json.load(answer)
        found[document["counts_of"]] = document
        if len(found) == document["processes"]:
            return found
    raise AssertionError(f"only {list(found)} ever answered")


def forwarded(document: dict[str, Any]) -> Counter[str]:
    return Counter({
        e["name"]: sum(tally["forwarded"] for tally in e["counters"].values())
        for e in document["endpoints"]
    })  # fmt: skip


def test_both_processes_serve_and_their_counts_are_summed(ranks):
    port = free_ports()
    with router_of(ranks, port, "both") as router:
        assert router.url == f"http://127.0.0.1:{port}"
        assert ports.listeners(port) == 2
        seen = send(port)
        counters = router.counters()
        assert counters is not None
        complete = {name: roles["measured"]["complete"] for name, roles in counters.items()}
        assert complete == dict(seen)
        assert seen.total() == CONNECTIONS * EACH
        assert abs(seen["rank0"] - seen["rank1"]) <= 2
        own = documents(port)
        assert sorted(own) == ["process0", "process1"]
        shares = {name: forwarded(document) for name, document in own.items()}
        assert all(share.total() > 0 for share in shares.values())
        assert sum(shares.values(), Counter()) == seen
        # Each of them goes round exactly.
        assert all(abs(s["rank0"] - s["rank1"]) <= 1 for s in shares.values())
        whole = router.status()
        assert (whole["name"], whole["counts_of"], whole["processes"]) == (
            "both", "all processes", 2,
        )  # fmt: skip
        assert (whole["desired_endpoints"], whole["ready_endpoints"]) == (2, 2)
        assert forwarded(whole) == seen
        router.check_alive()


def test_a_policy_reaches_every_process_and_a_session_stays_at_one_rank(ranks):
    port = free_ports()
    with router_of(ranks, port, "policy") as router:
        router.use(RouterPolicy.session)
        assert {d["policy"] for d in documents(port).values()} == {"session"}
        for session in ("a", "b", "c"):
            assert len(send(port, 16, **{"x-session-id": session})) == 1
        assert all(forwarded(document).total() for document in documents(port).values())


def test_one_dead_process_is_the_routers_death_and_the_port_comes_free(ranks):
    port = free_ports()
    with router_of(ranks, port, "dead") as router:
        actor = ray.get_actor("dead.process1")
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=DEADLINE_S)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrialError, match=r"counters, process 1: its actor died") as caught:
            router.check_alive()
        assert caught.value.status == "crash"


def test_a_port_that_somebody_shares_already_is_told(ranks):
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        start = pytest.raises(TrialError, match=rf"port {port}: .*in use.*router\.port=")
        with start as caught, router_of(ranks, port, "taken"):
            pass
        assert caught.value.status == "failed"
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_a_stranger_that_joins_later_is_noticed_before_the_next_cell(ranks):
    port = free_ports()
    with router_of(ranks, port, "joined") as router:
        with (
            socket.create_server(("127.0.0.1", port), reuse_port=True),
            pytest.raises(TrialError, match=rf"3 sockets listen on port {port}.*router\.port="),
        ):
            router.use(RouterPolicy.round_robin)
        router.use(RouterPolicy.round_robin)


def test_a_single_process_shares_its_port_with_nobody(ranks):
    port = free_ports()
    config = config_of(port)
    config.router.processes = 1
    router = OwnRouter(config, "single", [RouterPolicy.round_robin], ranks, {}, [])
    try:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port), reuse_port=True)
        document = documents(port)["all processes"]
        assert (document["name"], document["processes"]) == ("single", 1)
    finally:
        router.close()
