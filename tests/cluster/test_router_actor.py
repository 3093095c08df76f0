"""The router as a Ray actor: calls, bytes past Ray, and a killed actor's port."""

from __future__ import annotations

import http.server
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
import ray

from serving.router.actor import RouterActor

DEADLINE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def rank() -> Iterator[str]:
    """A real HTTP server; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def get(reference):
    return ray.get(reference, timeout=DEADLINE_S)


def test_requests_pass_and_are_counted(rank):
    actor = RouterActor.remote("group")
    url = get(actor.start.remote())
    get(actor.set_endpoints.remote([("rank0", rank)], 1, {"dp": 1}))
    for _ in range(3):
        with urllib.request.urlopen(f"{url}/v1/completions", b"{}", DEADLINE_S) as answer:
            assert answer.read() == b"ok"
            assert answer.headers["x-ep-ray-endpoint"] == "rank0"
    assert get(actor.counters.remote())["rank0"]["measured"]["complete"] == 3
    assert get(actor.status.remote())["parallelism"] == {"dp": 1}
    assert "404" in str(get(actor.probe.remote())) or "501" in str(get(actor.probe.remote()))
    assert get(actor.stop.remote(1.0)) == 0
    ray.kill(actor)


def test_a_taken_port_is_told_through_ray():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        actor = RouterActor.remote("group", port=port)
        with pytest.raises(ray.exceptions.RayTaskError, match=rf"{port}.*router\.port="):
            get(actor.start.remote())
    ray.kill(actor)


def test_a_killed_actor_frees_its_port():
    actor = RouterActor.remote("group")
    port = int(get(actor.start.remote()).rsplit(":", 1)[1])
    ray.kill(actor)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            socket.create_server(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"port {port} is still taken"
            time.sleep(0.05)
