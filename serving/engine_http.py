"""The few HTTP calls that an engine's actor makes to its own server: readiness and counters."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z0-9_:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.M)
_REASON = re.compile(r'finished_reason="([^"]*)"')
_ENGINE = re.compile(r'(?:^|,)engine="(\d+)"')
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
_COMPLETE = ("stop", "length", "repetition")
STABLE_READINGS = 3
STABLE_INTERVAL_S = 0.15


@dataclass(frozen=True)
class Counters:
    """What an engine has counted since it started.

    Attributes:
        finished: Requests by vLLM's `finished_reason`.
        e2e_count: Observations of the end-to-end latency.
        running: Requests in the batch now.
        waiting: Requests in the queue now.
    """

    finished: dict[str, int] = field(default_factory=dict)
    e2e_count: int = 0
    running: int = 0
    waiting: int = 0

    @property
    def complete(self) -> int:
        return sum(self.finished.get(reason, 0) for reason in _COMPLETE)

    @property
    def aborted(self) -> int:
        return self.finished.get("abort", 0)

    @property
    def failed(self) -> int:
        return sum(self.finished.values()) - self.complete - self.aborted


def parse_counters(text: str) -> Counters:
    """Reads the Prometheus text of `/metrics`."""
    finished: dict[str, int] = {}
    sums = {"vllm:e2e_request_latency_seconds_count": 0.0, RUNNING: 0.0, WAITING: 0.0}
    for sample in _SAMPLE.finditer(text):
        name, value = sample["name"], sample["value"]
        if name == "vllm:request_success_total":
            found = _REASON.search(sample["labels"] or "")
            reason = found[1] if found else "unknown"
            finished[reason] = finished.get(reason, 0) + int(float(value))
        elif name in sums:
            sums[name] += float(value)
    e2e, running, waiting = (int(value) for value in sums.values())
    return Counters(finished, e2e, running, waiting)


def parse_running(text: str) -> dict[int | None, tuple[int, int]]:
    """Requests running and waiting of each engine behind `/metrics`.

    Several data-parallel engines may stand behind one server.

    Returns:
        (running, waiting) by the label `engine`, which is None where there is none; nothing for
        an engine without the gauge of running requests.
    """
    gauges: dict[str, dict[int | None, int]] = {RUNNING: {}, WAITING: {}}
    for sample in _SAMPLE.finditer(text):
        if (of_engine := gauges.get(sample["name"])) is not None:
            found = _ENGINE.search(sample["labels"] or "")
            engine = int(found[1]) if found else None
            of_engine[engine] = of_engine.get(engine, 0) + int(float(sample["value"]))
    waiting = gauges[WAITING]
    return {engine: (count, waiting.get(engine, 0)) for engine, count in gauges[RUNNING].items()}


def get(url: str, timeout_s: float) -> str:
    """Body of a GET. Raises OSError (HTTPError is one) when it fails."""
    with _DIRECT.open(url, timeout=timeout_s) as response:
        return str(response.read().decode())


def is_healthy(base_url: str, timeout_s: float = 5.0) -> bool:
    """Whether `/health` answers 200. It says that the local engine lives, not that it serves."""
    try:
        get(f"{base_url}/health", timeout_s)
    except OSError:
        return False
    return True


def generate_one_token(base_url: str, model: str, token_id: int, timeout_s: float) -> None:
    """Proves that a rank serves. Raises OSError, or ValueError with an answer that is no token."""
    body = {"model": model, "prompt": [token_id], "max_tokens": 1, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    request = urllib.request.Request(
        f"{base_url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with _DIRECT.open(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.loads(response.read())
    except urllib.error.HTTPError as error:
        detail = error.read(2000).decode(errors="replace")
        raise ValueError(f"HTTP {error.code} for a one-token completion: {detail}") from None
    if answer.get("usage", {}).get("completion_tokens") != 1:
        raise ValueError(f"asked for one token, got {answer}")


def counters(base_url: str, timeout_s: float = 10.0) -> Counters:
    """Reads `/metrics` of a server. Raises OSError when it does not answer."""
    return parse_counters(get(f"{base_url.rstrip('/')}/metrics", timeout_s))


def stable_counters(read: Callable[[], Counters], timeout_s: float) -> Counters:
    """Reads until the engine is idle and three readings in a row agree.

    vLLM counts a request after it has queued its output, so a client can see the end first.

    Raises:
        TimeoutError: They still moved at the deadline; with the last reading.
    """
    deadline = time.monotonic() + timeout_s
    last, agreed = read(), 1
    while agreed < STABLE_READINGS or last.running or last.waiting:
        if time.monotonic() > deadline:
            raise TimeoutError(f"engine counters did not settle within {timeout_s:g} s: {last}")
        time.sleep(STABLE_INTERVAL_S)
        now = read()
        last, agreed = now, agreed + 1 if now == last else 1
    return last
