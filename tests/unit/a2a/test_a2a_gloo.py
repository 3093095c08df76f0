"""The all-to-all core over real gloo communicators of 1, 2 and 4 processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ep_ray.a2a.neutral import FLOOR_ITERATIONS
from ep_ray.a2a.stats import concat, headline_ns
from ep_ray.a2a.timing import SPIN_NS
from ep_ray.config.schema import Dtype, RoutingKind
from sweeps.tables import OPERATIONS

DRAWN = [kind for kind in RoutingKind if kind is not RoutingKind.file]
VARIANTS = ("exact", "equal", "padded")
WHOLE = ["dispatch", "combine", "pair"]
SPLIT = ["dispatch_send", "dispatch_recv", "combine_send", "combine_recv"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("routing", DRAWN)
@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_gloo_passes_the_check(
    pool: Any,
    spec: Any,
    procedure: Any,
    ep: int,
    dtype: Dtype,
    routing: RoutingKind,
    variant: str,
) -> None:
    rule, options = procedure(routing=routing), {"variant": variant}
    assert pool.call(ep, "checked", spec(ep, dtype), rule, options, None) == [[]] * ep


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("masked", [0.3, 1.0])
def test_masked_experts_are_tolerated(
    pool: Any, spec: Any, procedure: Any, dtype: Dtype, masked: float, variant: str
) -> None:
    rule, options = procedure(masked_share=masked), {"variant": variant}
    assert pool.call(4, "checked", spec(4, dtype), rule, options, None) == [[]] * 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_token_and_one_expert_per_rank(
    pool: Any, spec: Any, procedure: Any, variant: str
) -> None:
    small, options = spec(4, tokens=1, hidden=128, experts=4, topk=1), {"variant": variant}
    assert pool.call(4, "checked", small, procedure(), options, None) == [[]] * 4


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
def test_a_wrong_backend_is_caught(pool: Any, spec: Any, procedure: Any, wrong: str) -> None:
    # With balanced routing over two ranks every token reaches both: 48 rows each.
    rule = procedure(routing=RoutingKind.balanced)
    verdicts = pool.call(2, "checked", spec(2), rule, {}, wrong)
    assert verdicts[0] == verdicts[1]
    assert any(WRONG[wrong] in fault for fault in verdicts[0]), verdicts[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_wire_carries_what_is_declared(
    pool: Any, spec: Any, procedure: Any, ep: int, dtype: Dtype, variant: str
) -> None:
    rule, options = procedure(routing=RoutingKind.zipf), {"variant": variant}
    for rank in pool.call(ep, "wire", spec(ep, dtype), rule, options):
        for op, (declared, counted) in rank.items():
            assert declared == counted, op
            assert (counted > 0) == (ep > 1)


def test_no_rank_starts_before_the_last_has_come(pool: Any) -> None:
    came, started = zip(*pool.call(4, "common_start", 4), strict=True)
    assert min(started) >= max(came) + SPIN_NS


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_trial_gives_samples_and_facts(pool: Any, spec: Any, procedure: Any, ep: int) -> None:
    results = pool.call(ep, "trial", spec(ep), procedure(), {}, None)
    samples = concat([result.samples for result in results])
    assert [result.error for result in results] == [None] * ep
    assert all(result.operations == [] for result in results[1:])
    assert [facts["op"] for facts in results[0].operations] == WHOLE + SPLIT
    for facts in results[0].operations:
        op = facts["op"]
        assert set(facts) == set(OPERATIONS.names[2:])
        assert len(samples.of(op)) == 5 * ep
        assert len(samples.of(op, "cold")) == ep
        assert len(samples.of(op, "warmup")) == facts["warmup_iterations"] * ep
        assert headline_ns(samples, op) > 0
        assert (facts["link_bytes_per_s"] is None) == (ep == 1)
        assert facts["checked"]
        if op in WHOLE:
            assert (facts["bound_ns"] is None) == (ep == 1)
            assert (facts["wire_bytes_total"] == 0) == (ep == 1)
        else:
            assert facts["bound_ns"] is facts["wire_bytes_total"] is None
    assert len(samples.of("empty", "floor")) == FLOOR_ITERATIONS * ep


def test_the_pair_moves_both_ways(pool: Any, spec: Any, procedure: Any) -> None:
    rows = pool.call(2, "trial", spec(2), procedure(), {}, None)[0].operations
    dispatch, combine, pair = rows[:3]
    assert pair["bound_ns"] == pytest.approx(dispatch["bound_ns"] + combine["bound_ns"])
    assert pair["wire_bytes_total"] == dispatch["wire_bytes_total"] + combine["wire_bytes_total"]


def test_a_failed_check_gives_no_latency(pool: Any, spec: Any, procedure: Any) -> None:
    for result in pool.call(2, "trial", spec(2), procedure(), {}, "WrongScale"):
        assert len(result.samples) == 0
        assert result.operations == []
        assert "correctness check failed: rank 0, routing 0" in result.error


def test_an_unchecked_trial_says_so(pool: Any, spec: Any, procedure: Any) -> None:
    rule = procedure(check=False, split=False)
    result = pool.call(2, "trial", spec(2), rule, {}, None)[0]
    assert [facts["checked"] for facts in result.operations] == [False] * 3


def test_warm_up_stops_at_the_same_iteration_on_all_ranks(
    pool: Any, spec: Any, procedure: Any
) -> None:
    rule = procedure(max_warmup=200, warmup_tolerance=0.5)
    results = pool.call(4, "trial", spec(4), rule, {}, None)
    counts = {len(result.samples.of("pair", "warmup")) for result in results}
    assert len(counts) == 1
    assert counts.pop() % 20 == 0


def test_one_hot_leaves_ranks_without_rows(pool: Any, spec: Any, procedure: Any) -> None:
    rule = procedure(routing=RoutingKind.one_hot)
    facts = pool.call(4, "trial", spec(4), rule, {}, None)[0].operations
    assert facts[0]["max_over_mean_received_rows"] == pytest.approx(4.0)
    assert np.isfinite(facts[0]["bound_ns"])
