"""The sampler of running requests, over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from serving.load.client import run_cell
from serving.load.prompts import CallSpec, build_requests
from serving.load.target import Target
from serving.null_engine import running
from serving.null_server import Pace
from serving.running import RunningSampler

DEADLINE_S = 60.0
TWO_ENGINES = """\
vllm:num_requests_running{engine="2",model_name="m"} 5.0
vllm:num_requests_running{engine="3",model_name="m"} 0.0
vllm:num_requests_waiting{engine="2",model_name="m"} 1.0
"""


@contextmanager
def metrics_server(answer: Callable[[str], tuple[int, str]]) -> Iterator[str]:
    """Gives `answer(path)` on loopback, as the status and the text."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            status, text = answer(self.path)
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(DEADLINE_S)
        server.server_close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_rank_runs_is_read_while_it_runs():
    spec = CallSpec("null", "completions", 3, 40, 1000)
    requests = build_requests(spec, seed=0, trial_id="t", measured=3)
    began_ns = time.monotonic_ns()
    with (
        running(Pace(10_000_000, 50_000_000)) as busy,
        running(Pace()) as free,
        RunningSampler([("busy", busy.url), ("free", free.url)]) as sampler,
    ):
        record = run_cell(Target.parse(busy.url, "completions"), requests, 3, DEADLINE_S)
    first_ns = record.first_sent_ns or 0
    inside = [
        r
        for r in sampler.readings
        if first_ns + 200_000_000 < r.monotonic_ns < first_ns + record.wall_ns - 700_000_000
    ]
    # All three run at once and for two seconds.
    assert {(r.endpoint, r.engine, r.running, r.waiting) for r in inside} == {
        ("busy", None, 3, 0),
        ("free", None, 0, 0),
    }
    asked = Counter(r.monotonic_ns for r in sampler.readings)
    assert set(asked.values()) <= {1, 2}, "the answers to one asking do not share its stamp"
    assert 2 in asked.values()
    assert all(began_ns <= at_ns <= time.monotonic_ns() for at_ns in asked)


def test_engines_behind_one_server_are_apart_and_only_two_metrics_are_asked_for():
    paths: list[str] = []

    def answer(path: str) -> tuple[int, str]:
        paths.append(path)
        return 200, TWO_ENGINES

    with (
        metrics_server(answer) as url,
        RunningSampler([("r", f"{url}/behind/")]) as sampler,
    ):
        until(lambda: len(sampler.readings) >= 4)
    found = [(r.endpoint, r.engine, r.running, r.waiting) for r in sampler.readings]
    assert found[:4] == [("r", 2, 5, 1), ("r", 3, 0, 0)] * 2
    assert set(paths) == {
        "/behind/metrics?name%5B%5D=vllm:num_requests_running&name%5B%5D=vllm:num_requests_waiting"
    }


def test_a_server_that_cannot_give_a_part_is_asked_for_all():
    def whole_only(path: str) -> tuple[int, str]:
        return (200, TWO_ENGINES) if path == "/metrics" else (404, "no such page")

    def empty_part(path: str) -> tuple[int, str]:
        return 200, "" if "?" in path else TWO_ENGINES

    with (
        metrics_server(whole_only) as one,
        metrics_server(empty_part) as other,
        RunningSampler([("one", one), ("other", other)]) as sampler,
    ):
        until(lambda: {r.endpoint for r in sampler.readings} == {"one", "other"})


def test_ranks_that_do_not_answer_leave_gaps_and_hold_nobody_up():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_server(("127.0.0.1", 0)) as closed,
        metrics_server(lambda _: (200, TWO_ENGINES)) as good,
        metrics_server(lambda _: (200, "vllm:num_requests_running x\n")) as wrong,
    ):
        gone = closed.getsockname()[1]
        closed.close()
        ranks = {
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "gone": f"http://127.0.0.1:{gone}",
            "wrong": wrong,
            "good": good,
        }
        with RunningSampler(list(ranks.items())) as sampler:
            # The silent one is given up each time, and the others are asked again.
            until(lambda: len({r.monotonic_ns for r in sampler.readings}) >= 3)
        assert {r.endpoint for r in sampler.readings} == {"good"}


def test_it_ends_at_once_and_leaves_no_thread():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with RunningSampler([("silent", url)]):
            asked = silent.accept()[0]
        asked.close()
        assert "running requests" not in {thread.name for thread in threading.enumerate()}
    with RunningSampler([]) as sampler:
        pass
    assert sampler.readings == []
