"""Counters: parsing what vLLM 0.30.0 printed, and waiting until they settle."""

from collections.abc import Iterator

import pytest

from serving.engine_http import Counters, parse_counters, parse_running, stable_counters

METRICS = """\
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 5.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 3.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 1.0
vllm:request_success_total{engine="1",finished_reason="length",model_name="a} 9\\"b"} 1.0
vllm:request_success_created{engine="0",finished_reason="stop",model_name="tiny"} 1.79e+09
vllm:num_requests_running{engine="0",model_name="tiny"} 4.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 6.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 6.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 8.0
"""


def test_counters_are_split_by_reason() -> None:
    found = parse_counters(METRICS)
    assert found.finished == {"stop": 2, "length": 6, "abort": 3, "error": 1}
    assert (found.complete, found.aborted, found.failed) == (8, 3, 1)
    assert (found.e2e_count, found.running, found.waiting) == (8, 4, 6)


def test_engines_behind_one_server_are_read_apart() -> None:
    more = """\
vllm:num_requests_running{engine="12",model_name="a} 9\\"b",other_engine="7"} 3.0
vllm:num_requests_waiting{model_name="tiny",engine="12"} 2.0
vllm:num_requests_running{engine="3",model_name="tiny"} 1.0
"""
    assert parse_running(METRICS + more) == {0: (4, 6), 12: (3, 2), 3: (1, 0)}
    assert parse_running("vllm:num_requests_running 2\n") == {None: (2, 0)}
    assert parse_running('vllm:num_requests_waiting{engine="0"} 2.0\n') == {}


def test_reading_waits_until_idle_and_unchanged() -> None:
    busy = Counters({"length": 1}, 1, running=1)
    late = Counters({"length": 1}, 1)
    done = Counters({"length": 2}, 2)
    readings: Iterator[Counters] = iter([busy, busy, busy, busy, late, done, done, done])
    assert stable_counters(lambda: next(readings), 30.0) == done
    assert next(readings, None) is None


def test_counters_that_never_settle_end_at_the_deadline() -> None:
    busy = Counters({"length": 1}, 1, running=1)
    with pytest.raises(TimeoutError, match="running=1"):
        stable_counters(lambda: busy, 0.5)
