"""The all-to-all core over real gloo communicators of 1, 2 and 4 processes."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ep_ray.a2a.bench import FLOOR_ITERATIONS, Procedure
from ep_ray.a2a.stats import concat, headline_ns
from ep_ray.a2a.timing import SPIN_NS
from ep_ray.backends.base import Spec
from ep_ray.config.schema import Dtype, RoutingKind
from sweeps.tables import OPERATIONS

WORLD = 4
DEADLINE_S = 120.0
WORKER = Path(__file__).parent / "a2a_worker.py"


class Pool:
    """Long-lived gloo ranks; a case runs on the first `ep` of them."""

    def __init__(self, store: Path) -> None:
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(rank), str(WORLD), str(store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
            )
            for rank in range(WORLD)
        ]

    def call(self, ep: int, case: str, *arguments: Any) -> list[Any]:
        """Answers of the ranks, in order."""
        for rank in self.ranks[:ep]:
            assert rank.stdin is not None
            rank.stdin.write(pickle.dumps((case, arguments)))
            rank.stdin.flush()
        deadline = time.monotonic() + DEADLINE_S
        answers = [self._answer(rank, deadline) for rank in self.ranks[:ep]]
        errors = [error for _, error in answers if error]
        assert not errors, errors[0]
        return [value for value, _ in answers]

    def _answer(self, rank: subprocess.Popen[bytes], deadline: float) -> Any:
        assert rank.stdout is not None
        ready, _, _ = select.select([rank.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"rank process {rank.pid} did not answer within {DEADLINE_S} s"
        return pickle.load(rank.stdout)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate(timeout=10)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(tmp_path_factory.mktemp("gloo") / "store")
    yield ranks
    ranks.close()


def spec(ep: int, dtype: Dtype = Dtype.fp8, **changes: int) -> Spec:
    shape = {"tokens": 24, "hidden": 512, "experts": 32, "topk": 4} | changes
    return Spec(ep=ep, dispatch_dtype=dtype, **shape)


def procedure(**changes: Any) -> Procedure:
    return Procedure(**({"iterations": 5, "seed": 3, "max_warmup": 20} | changes))


@pytest.mark.parametrize("routing", RoutingKind)
@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_gloo_passes_the_check(pool: Pool, ep: int, dtype: Dtype, routing: RoutingKind) -> None:
    verdicts = pool.call(ep, "checked", spec(ep, dtype), procedure(routing=routing), None, 0.0)
    assert verdicts == [[]] * ep


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("masked", [0.3, 1.0])
def test_masked_experts_are_tolerated(pool: Pool, dtype: Dtype, masked: float) -> None:
    verdicts = pool.call(4, "checked", spec(4, dtype), procedure(), None, masked)
    assert verdicts == [[]] * 4


def test_one_token_and_one_expert_per_rank(pool: Pool) -> None:
    small = spec(4, tokens=1, hidden=128, experts=4, topk=1)
    assert pool.call(4, "checked", small, procedure(), None, 0.0) == [[]] * 4


WRONG = {
    "SwapsPayloads": "rank 0, routing 0: (token, expert) pairs",
    "SwapsRows": "combined rows are outside",
    "LosesRow": "rank 0, routing 0: (token, expert) pairs",
    "HidesRow": "rank 0, routing 0: 47 rows received, 48 expected",
    "WrongScale": "rank 0, routing 0: 1 of 48 received rows differ",
    "StaleDispatch": "rank 0, routing 1: 1 of 48 received rows differ",
    "StaleCombine": "rank 0, routing 1: 24 of 24 combined rows",
    "SkipsOutput": "rank 0, routing 0: 1 of 24 combined rows",
    "WrongWeight": "router weights differ",
    "IgnoresWeights": "combined rows are outside",
    "WrongExpert": "rank 0, routing 0: (token, expert) pairs",
    "Miscounts": "counts per source",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_backend_is_caught(pool: Pool, wrong: str) -> None:
    # With balanced routing over two ranks every token reaches both: 48 rows each.
    rule = procedure(routing=RoutingKind.balanced)
    verdicts = pool.call(2, "checked", spec(2), rule, wrong, 0.0)
    assert verdicts[0] == verdicts[1]
    assert any(WRONG[wrong] in fault for fault in verdicts[0]), verdicts[0]


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_wire_carries_what_is_declared(pool: Pool, ep: int, dtype: Dtype) -> None:
    for rank in pool.call(ep, "wire", spec(ep, dtype), procedure(routing=RoutingKind.zipf)):
        for op, (declared, counted) in rank.items():
            assert declared == counted, op
            assert (counted > 0) == (ep > 1)


def test_no_rank_starts_before_the_last_has_come(pool: Pool) -> None:
    came, started = zip(*pool.call(4, "common_start", 4), strict=True)
    assert min(started) >= max(came) + SPIN_NS


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_trial_gives_samples_and_facts(pool: Pool, ep: int) -> None:
    results = pool.call(ep, "trial", spec(ep), procedure(), None)
    samples = concat([result.samples for result in results])
    assert [result.error for result in results] == [None] * ep
    assert all(result.operations == results[0].operations for result in results)
    for facts in results[0].operations:
        op = facts["op"]
        assert set(facts) == set(OPERATIONS.names[2:])
        assert len(samples.of(op)) == 5 * ep
        assert len(samples.of(op, "cold")) == ep
        assert len(samples.of(op, "warmup")) == facts["warmup_iterations"] * ep
        assert headline_ns(samples, op) > 0
        assert (facts["bound_ns"] is None) == (facts["link_bytes_per_s"] is None) == (ep == 1)
        assert (facts["wire_bytes_total"] == 0) == (ep == 1)
        assert facts["checked"]
    assert len(samples.of("empty", "floor")) == FLOOR_ITERATIONS * ep


def test_the_pair_moves_both_ways(pool: Pool) -> None:
    facts = pool.call(2, "trial", spec(2), procedure(), None)[0].operations
    dispatch, combine, pair = facts
    assert pair["bound_ns"] == pytest.approx(dispatch["bound_ns"] + combine["bound_ns"])
    assert pair["wire_bytes_total"] == dispatch["wire_bytes_total"] + combine["wire_bytes_total"]


def test_a_failed_check_gives_no_latency(pool: Pool) -> None:
    for result in pool.call(2, "trial", spec(2), procedure(), "WrongScale"):
        assert len(result.samples) == 0
        assert result.operations == []
        assert "correctness check failed: rank 0, routing 0" in result.error


def test_an_unchecked_trial_says_so(pool: Pool) -> None:
    result = pool.call(2, "trial", spec(2), procedure(check=False), None)[0]
    assert [facts["checked"] for facts in result.operations] == [False] * 3


def test_warm_up_stops_at_the_same_iteration_on_all_ranks(pool: Pool) -> None:
    rule = procedure(max_warmup=200, warmup_tolerance=0.5)
    results = pool.call(4, "trial", spec(4), rule, None)
    counts = {len(result.samples.of("pair", "warmup")) for result in results}
    assert len(counts) == 1
    assert counts.pop() % 20 == 0


def test_one_hot_leaves_ranks_without_rows(pool: Pool) -> None:
    rule = procedure(routing=RoutingKind.one_hot)
    facts = pool.call(4, "trial", spec(4), rule, None)[0].operations
    assert facts[0]["max_over_mean_received_rows"] == pytest.approx(4.0)
    assert np.isfinite(facts[0]["bound_ns"])
