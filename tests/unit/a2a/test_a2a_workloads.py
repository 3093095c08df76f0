"""Uneven, masked and real routings over real gloo communicators, and capacities that overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ep_ray.a2a.pool import draw_pool
from ep_ray.a2a.procedure import Procedure
from ep_ray.a2a.routing_file import read_routing
from ep_ray.backends.base import Spec
from ep_ray.config.schema import RoutingKind

VARIANTS = ("exact", "equal", "padded")
LENGTHS = ["ragged", (0, 24, 5, 1), (0, 0, 0, 0)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_ranks_may_send_different_numbers_of_tokens(
    pool: Any, spec: Any, procedure: Any, lengths: Any, variant: str
) -> None:
    rule, options = procedure(tokens_per_rank=lengths), {"variant": variant}
    assert pool.call(4, "checked", spec(4, ragged=True), rule, options, None) == [[]] * 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_that_is_not_sent_arrives_nowhere(
    pool: Any, spec: Any, procedure: Any, variant: str
) -> None:
    # One token, one expert: one row in all, whatever the slots.
    rule = procedure(tokens_per_rank=(1, 0))
    point = spec(2, topk=1, ragged=True)
    assert sum(pool.call(2, "received_rows", point, rule, {"variant": variant})) == 1


def test_an_uneven_trial_is_timed_and_its_bytes_are_those_of_the_real_tokens(
    pool: Any, spec: Any, procedure: Any
) -> None:
    even, uneven = (
        pool.call(2, "trial", spec(2, ragged=True), procedure(tokens_per_rank=n), {}, None)[0]
        for n in ("uniform", (24, 0))
    )
    assert uneven.error is None
    # Rank 1 sends nothing but the counts.
    bytes_ = [result.operations[0]["wire_bytes_total"] - 16 for result in (even, uneven)]
    assert bytes_[1] < 0.7 * bytes_[0]


def test_lengths_and_masks_are_drawn_from_the_seed_alone() -> None:
    point = Spec(ep=2, tokens=50, hidden=128, experts=8, topk=4, ragged=True)
    rule = Procedure(1, seed=7, tokens_per_rank="ragged", masked_share=0.25)
    first, again, other = (draw_pool(point, rule, rank) for rank in (0, 0, 1))
    lengths = [len(routing.topk_idx) for routing in first]
    assert lengths == [len(routing.topk_idx) for routing in again]
    assert lengths != [len(routing.topk_idx) for routing in other]
    assert min(lengths) < 15
    assert max(lengths) > 35
    idx = torch.cat([routing.topk_idx for routing in first])
    weights = torch.cat([routing.weights for routing in first])
    assert 0.2 < float((idx < 0).float().mean()) < 0.3
    assert torch.equal(weights == 0, idx < 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_real_choices_are_sent_row_by_row(
    pool: Any, spec: Any, procedure: Any, tmp_path: Path, variant: str
) -> None:
    rng = np.random.default_rng(0)
    rows = np.argsort(rng.random((77, 32)), axis=1)[:, :4].astype(np.int32)
    rows[3, 1] = -1
    np.save(tmp_path / "real.npy", rows)
    table = read_routing(str(tmp_path / "real.npy"), experts=32, topk=4)
    rule = procedure(routing=RoutingKind.file)
    results = pool.call(4, "trial", spec(4), rule, {"variant": variant}, None, table.topk_idx)
    assert [result.error for result in results] == [None] * 4
    drawn = [draw_pool(spec(4), rule, rank, table.topk_idx)[0].topk_idx for rank in range(4)]
    # Four ranks of 24 tokens take 96 of 77 rows: the first 77, then from the start again.
    assert np.array_equal(np.concatenate(drawn), rows[np.arange(96) % 77])


def test_both_forms_of_parquet_and_npy_hold_the_same(tmp_path: Path) -> None:
    rows = np.array([[1, 2, 3], [7, 0, -1]], np.int32)
    np.save(tmp_path / "a.npy", rows)
    columns = {f"k{k}": rows[:, k] for k in range(3)}
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    pq.write_table(pa.table({"topk_idx": rows.tolist()}), tmp_path / "c.parquet")
    for name in ("a.npy", "b.parquet", "c.parquet"):
        table = read_routing(str(tmp_path / name), experts=8, topk=3)
        assert table.topk_idx.dtype == np.int64
        assert np.array_equal(table.topk_idx, rows), name
        assert len(table.digest) == 64


BAD = {
    "wide": (np.array([[0, 1, 2]]), r"found shape \[1, 3\], asked \[N, 2\]"),
    "flat": (np.array([0, 1]), r"found shape \[2\]"),
    "empty": (np.zeros((0, 2), int), r"with N >= 1"),
    "floats": (np.array([[0.0, 1.0]]), "found float64, asked integers"),
    "beyond": (np.array([[0, 1], [2, 8]]), "expert 8 in row 1; workload.experts=8 allows 0 to 7"),
    "below": (np.array([[-2, 1]]), "expert -2 in row 0"),
    "twice": (np.array([[1, 2], [3, 3]]), r"row 1 names an expert twice: \[3, 3\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    rows, message = BAD[name]
    np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(ValueError, match=message):
        read_routing(str(tmp_path / "rows.npy"), experts=8, topk=2)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_routing(str(tmp_path / "none.npy"), 8, 2)
    (tmp_path / "rows.csv").write_text("0,1")
    with pytest.raises(ValueError, match=r"found \.csv; write \.npy or \.parquet"):
        read_routing(str(tmp_path / "rows.csv"), 8, 2)
    (tmp_path / "rows.npy").write_text("no array")
    with pytest.raises(ValueError, match=r"cannot be read as \.npy"):
        read_routing(str(tmp_path / "rows.npy"), 8, 2)


def test_a_capacity_that_suffices_passes_and_shortens_the_wire(
    pool: Any, spec: Any, procedure: Any
) -> None:
    rule = procedure(routing=RoutingKind.balanced)
    # 24 tokens of 4 choices over 4 ranks: 24 rows to each.
    options = {"variant": "padded", "capacity": 24}
    assert pool.call(4, "checked", spec(4), rule, options, None) == [[]] * 4
    for rank in pool.call(4, "wire", spec(4), rule, options):
        assert rank["dispatch"][0] == rank["dispatch"][1] == 3 * 24 * (512 + 16 + 8)


def test_a_capacity_that_overflows_is_an_error_on_every_rank(
    pool: Any, spec: Any, procedure: Any
) -> None:
    rule, options = procedure(routing=RoutingKind.one_hot), {"variant": "padded", "capacity": 95}
    answers = pool.outcomes(4, "received_rows", spec(4), rule, options)
    for _, error in answers:
        assert "sends 96 rows to rank 0, more than `backend.options.capacity=95`" in str(error)


def test_ranks_of_a_local_tp_group_share_one_batch(spec: Any) -> None:
    whole = draw_pool(spec(1, tokens=8), Procedure(1, seed=3), 1)
    shares = [draw_pool(spec(1, tokens=4), Procedure(1, seed=3, local_tp=2), r) for r in (2, 3)]
    for routing, *parts in zip(whole, *shares, strict=False):
        for place, part in enumerate(parts):
            assert part.topk_idx.tolist() == routing.topk_idx[place::2].tolist()
            assert part.weights.tolist() == routing.weights[place::2].tolist()


def test_a_local_tp_group_shares_a_batch_of_a_file_too(spec: Any) -> None:
    table = np.arange(4 * 64).reshape(64, 4) % 32
    rule = Procedure(1, routing=RoutingKind.file, local_tp=2)
    pools = [draw_pool(spec(4, tokens=3), rule, rank, table) for rank in range(4)]
    for iteration in range(2):
        for rank, pool in enumerate(pools):
            first = (iteration * 2 + rank // 2) * 6 + rank % 2
            assert pool[iteration].topk_idx.tolist() == table[first : first + 6 : 2].tolist()


def test_a_local_tp_group_passes_the_check(pool: Any, spec: Any, procedure: Any) -> None:
    results = pool.call(4, "trial", spec(4), procedure(local_tp=2), {}, None)
    assert [result.error for result in results] == [None] * 4
