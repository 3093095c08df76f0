"""Other projects' ways of measuring, split and overlapped samples, over real gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ep_ray.a2a.compat import DEEPEP_WARMUP, LOOP, LOOP_WARMUP
from ep_ray.a2a.statistic import statistic, statistic_in_words
from ep_ray.a2a.stats import Samples, concat, series
from ep_ray.config.schema import CompatKind
from sweeps.a2a_metrics import OPS
from sweeps.tables import OPERATIONS

WHOLE = ["dispatch", "combine", "pair"]
SPLIT = ["dispatch_send", "dispatch_recv", "combine_send", "combine_recv"]
# operations, measured samples of 40 iterations, untimed warm-up, operations in one sample
WAYS = {
    CompatKind.nccl_tests: (WHOLE, 2, LOOP_WARMUP, LOOP),
    CompatKind.uccl: (["dispatch", "combine"], 40, 40, 1),
    CompatKind.deepep: (WHOLE, 40, DEEPEP_WARMUP, 1),
    CompatKind.pplx_garden: (["dispatch", "combine", *SPLIT], 40, 40, 1),
}


def run(pool: Any, *arguments: Any) -> tuple[Samples, list[dict[str, Any]]]:
    results = pool.call(2, "trial", *arguments)
    assert [result.error for result in results] == [None, None]
    return concat([result.samples for result in results]), results[0].operations


@pytest.mark.parametrize("variant", ["exact", "equal"])
@pytest.mark.parametrize("way", CompatKind)
def test_a_way_of_measuring_gives_its_own_samples(
    pool: Any, spec: Any, procedure: Any, way: CompatKind, variant: str
) -> None:
    rule = procedure(iterations=40, compat=way)
    samples, operations = run(pool, spec(2), rule, {"variant": variant}, None)
    ops, measured, warmup, loop = WAYS[way]
    assert sorted(row["op"] for row in operations) == sorted(ops)
    for row in operations:
        assert set(row) == set(OPERATIONS.names[2:])
        chosen = samples.of(row["op"])
        assert len(chosen) == 2 * measured
        assert chosen.duration_ns.min() > 0
        assert (row["warmup_iterations"], row["loop"]) == (warmup, loop)
        assert row["statistic"] == statistic(way).words != statistic(None).words
        assert statistic_in_words(row["statistic"]).of(samples, row["op"]) > 0


def test_the_first_flushed_pair_is_kept_apart_as_deepep_leaves_it_out(
    pool: Any, spec: Any, procedure: Any
) -> None:
    rule = procedure(compat=CompatKind.deepep)
    samples, _ = run(pool, spec(2), rule, {}, None)
    assert len(samples.of("pair", "cold")) == 2
    assert not len(samples.of("dispatch", "cold"))


def test_statistics_are_those_of_the_projects() -> None:
    # Two ranks, three iterations.
    samples = concat([series("pair", "measured", 0, [10, 20, 90]),
                      series("pair", "measured", 1, [40, 30, 50])])  # fmt: skip
    values = {way: statistic(way).of(samples, "pair") for way in (None, *CompatKind)}
    assert values[None] == 40  # maxima 40 30 90
    assert values[CompatKind.pplx_garden] == values[CompatKind.uccl] == 35  # of 10 20 30 40 50 90
    assert values[CompatKind.deepep] == pytest.approx(240 / 6)
    assert values[CompatKind.nccl_tests] == 25  # means 25 25 70


def test_send_and_receive_are_the_parts_of_the_same_iteration(
    pool: Any, spec: Any, procedure: Any
) -> None:
    samples, operations = run(pool, spec(2), procedure(iterations=30), {}, None)
    regions = {row["op"]: row["timed_region"] for row in operations}
    assert regions["dispatch_send"] == f"{regions['dispatch']}: up to the launch of the exchange"
    parts = [samples.of(op).duration_ns for op in ("dispatch_send", "dispatch_recv")]
    assert (np.minimum(*parts) > 0).all()
    assert {row["op"] for row in operations} <= set(OPS)


def test_split_samples_can_be_left_out(pool: Any, spec: Any, procedure: Any) -> None:
    _, operations = run(pool, spec(2), procedure(split=False), {}, None)
    assert [row["op"] for row in operations] == WHOLE


@pytest.mark.parametrize("variant", ["exact", "equal", "padded"])
def test_overlapped_work_is_timed_with_the_pair_and_alone(
    pool: Any, spec: Any, procedure: Any, variant: str
) -> None:
    rule = procedure(split=False, overlap_us=2000.0)
    samples, operations = run(pool, spec(2), rule, {"variant": variant}, None)
    by_op = {row["op"]: row for row in operations}
    assert list(by_op) == [*WHOLE, "pair_overlapped", "work"]
    assert by_op["pair_overlapped"]["wire_bytes_total"] == by_op["pair"]["wire_bytes_total"]
    assert by_op["work"]["wire_bytes_total"] is by_op["work"]["bound_ns"] is None
    # Two matmuls are inside it, on any machine.
    fastest = samples.of("work").duration_ns.min()
    assert samples.of("pair_overlapped").duration_ns.max() > fastest > 0
