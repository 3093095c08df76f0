"""Turns, circuits and counters of the router, without sockets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.endpoint import Circuit, CircuitState, Endpoint, Tally, split_url
from serving.router.policy import RoundRobin


def group(size: int) -> list[Endpoint]:
    return [Endpoint(f"rank{r}", f"http://127.0.0.1:{8000 + r}", 5.0) for r in range(size)]


@given(st.integers(1, 9), st.integers(0, 300))
def test_round_robin_is_exact(size, requests):
    turns = RoundRobin()
    turns.assign(group(size))
    counts = Counter({e.name: 0 for e in turns.endpoints})
    for _ in range(requests):
        endpoint = turns.choose(None, 0.0)
        assert endpoint is not None
        counts[endpoint.name] += 1
    assert max(counts.values()) - min(counts.values()) <= 1


def test_an_open_circuit_leaves_the_others_even():
    turns = RoundRobin()
    turns.assign(group(3))
    for _ in range(3):
        turns.endpoints[1].circuit.failed(0.0)
    names = [turns.choose(None, 1.0).name for _ in range(6)]
    assert names == ["rank0", "rank2"] * 3


def test_naming_the_same_endpoints_again_keeps_the_turn():
    turns, endpoints = RoundRobin(), group(2)
    turns.assign(endpoints)
    assert turns.choose(None, 0.0).name == "rank0"
    turns.assign(endpoints)
    assert turns.choose(None, 0.0).name == "rank1"


def test_nothing_to_choose_from():
    turns = RoundRobin()
    assert turns.choose(None, 0.0) is None


def test_circuit_opens_on_the_third_failure_in_a_row_and_tries_one_request():
    circuit = Circuit(cooldown_s=5.0)
    for _ in range(2):
        circuit.failed(1.0)
    circuit.succeeded()
    for _ in range(2):
        circuit.failed(2.0)
    assert circuit.allows(2.0)
    circuit.failed(3.0)
    assert not circuit.allows(7.9)
    assert circuit.allows(8.0)
    circuit.claim()
    assert circuit.state is CircuitState.half_open
    assert not circuit.allows(100.0)
    circuit.failed(8.5)
    assert not circuit.allows(13.4)
    assert circuit.allows(13.5)
    circuit.claim()
    circuit.succeeded()
    assert circuit.state is CircuitState.closed


def test_a_trial_whose_client_left_decides_nothing():
    circuit = Circuit(cooldown_s=1.0)
    for _ in range(3):
        circuit.failed(0.0)
    circuit.claim()
    circuit.undecided()
    assert circuit.allows(1.0)
    assert circuit.state is CircuitState.open


def test_tally_adds_up():
    assert Tally(forwarded=9, complete=4, failed=2, aborted=1).in_flight == 2


@pytest.mark.parametrize("url", ["https://a:1", "a:1", "http://a:1/v1", "http://:1", "http://a:x"])
def test_other_urls_are_refused(url):
    with pytest.raises(ValueError):
        split_url(url)


def test_url_parts():
    assert split_url("http://10.0.0.1:18000/") == ("10.0.0.1", 18000)
    assert split_url("http://[::1]:9") == ("::1", 9)
