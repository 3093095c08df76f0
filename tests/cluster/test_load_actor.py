"""The load client as a Ray actor: it answers while a cell runs, and can be stopped."""

from __future__ import annotations

import socket

import pytest
import ray

from serving.load.actor import LoadClient
from serving.load.prompts import CallSpec, build_requests
from serving.load.target import Target

DEADLINE_S = 60.0


@pytest.fixture
def client():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield LoadClient.options(num_cpus=0).remote()
    ray.shutdown()


def test_it_answers_while_a_cell_runs_and_stops_on_demand(client):
    requests = build_requests(
        CallSpec("m", "completions", 4, 4, vocab_size=1024), seed=0, trial_id="t", measured=5
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        silent.settimeout(DEADLINE_S)
        target = Target("127.0.0.1", silent.getsockname()[1], "/v1/completions")
        assert ray.get(client.stop.remote(), timeout=DEADLINE_S) is False
        running = client.run.remote([target], requests, 2, DEADLINE_S)
        connections = [silent.accept()[0] for _ in range(2)]
        for connection in connections:
            connection.settimeout(DEADLINE_S)
            assert connection.recv(4) == b"POST"
        assert ray.get(client.ping.remote(), timeout=DEADLINE_S) == socket.gethostname()
        with pytest.raises(RuntimeError, match="running a cell"):
            ray.get(client.run.remote([target], requests, 2, DEADLINE_S), timeout=DEADLINE_S)
        assert ray.get(client.stop.remote(), timeout=DEADLINE_S) is True
        cell = ray.get(running, timeout=DEADLINE_S)
    assert cell.stopped
    assert [record.state for record in cell.requests] == ["aborted", "aborted"]
    assert {record.reason for record in cell.requests} == {"stopped by the client"}
