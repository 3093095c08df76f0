from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_ray.a2a.routing import Routing, copies, draw, max_over_mean
from ep_ray.config.schema import RoutingKind

DRAWN = [kind for kind in RoutingKind if kind is not RoutingKind.file]
SHAPE: dict[str, Any] = {"tokens": 512, "experts": 256, "topk": 8, "ep": 8}


def one(kind: RoutingKind, **changes: Any) -> Routing:
    return draw(kind, **({"seed": 1, "rank": 0, "iteration": 0} | SHAPE | changes))


def everyone(kind: RoutingKind, **changes: Any) -> np.ndarray:
    ep = changes.get("ep", SHAPE["ep"])
    return np.stack([one(kind, rank=rank, **changes).topk_idx.numpy() for rank in range(ep)])


@pytest.mark.parametrize("kind", DRAWN)
def test_a_draw_is_distinct_in_range_and_weighted(kind: RoutingKind) -> None:
    routing = one(kind)
    idx = routing.topk_idx
    assert idx.dtype == torch.int64
    assert idx.shape == (512, 8)
    assert int(idx.min()) >= 0
    assert int(idx.max()) < 256
    assert all(len(set(row)) == 8 for row in idx.tolist())
    assert routing.weights.dtype == torch.float32
    assert bool((routing.weights > 0).all())
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(512))


@pytest.mark.parametrize("kind", DRAWN)
def test_a_draw_depends_on_its_arguments_alone(kind: RoutingKind) -> None:
    first = one(kind)
    np.random.seed(5)
    torch.manual_seed(5)
    again = one(kind)
    assert torch.equal(first.topk_idx, again.topk_idx)
    assert torch.equal(first.weights, again.weights)


@pytest.mark.parametrize("change", [{"seed": 2}, {"rank": 1}, {"iteration": 1}])
def test_seed_rank_and_iteration_all_matter(change: dict[str, int]) -> None:
    assert not torch.equal(
        one(RoutingKind.uniform).topk_idx, one(RoutingKind.uniform, **change).topk_idx
    )


def test_uniform_reaches_the_expected_ranks_per_token() -> None:
    rows = copies(everyone(RoutingKind.uniform), 256, 8, "rank")
    # 8 x p(32) = 5.3 of 8 ranks; 4,096 tokens put the mean within 0.05.
    assert rows.sum() / (8 * 512) == pytest.approx(5.30, abs=0.05)


def test_balanced_gives_every_expert_and_rank_the_same() -> None:
    idx = everyone(RoutingKind.balanced)
    assert set(np.bincount(idx.ravel(), minlength=256)) == {8 * 512 * 8 // 256}
    rows = copies(idx, 256, 8, "rank")
    assert (rows == 512).all()
    assert max_over_mean(rows) == 1.0


def test_one_hot_sends_everything_to_one_rank() -> None:
    rows = copies(everyone(RoutingKind.one_hot), 256, 8, "rank")
    assert rows.sum(axis=0).tolist() == [8 * 512] + [0] * 7
    assert max_over_mean(rows) == 8.0


def test_one_hot_needs_enough_experts_on_a_rank() -> None:
    with pytest.raises(ValueError, match=r"all 8 experts .* holds only 4"):
        one(RoutingKind.one_hot, experts=32)


def test_zipf_popularity_falls_with_the_exponent_and_is_shared() -> None:
    counts = np.bincount(everyone(RoutingKind.zipf).ravel(), minlength=256)
    steeper = np.bincount(everyone(RoutingKind.zipf, exponent=3.0).ravel(), minlength=256)
    flat = np.bincount(everyone(RoutingKind.zipf, exponent=0.0).ravel(), minlength=256)
    top = [np.sort(c)[-16:].sum() / c.sum() for c in (flat, counts, steeper)]
    assert top[0] < 0.1 < 0.4 < top[1] < 0.9 < top[2]
    # All ranks and iterations have the same favourite.
    other = np.bincount(one(RoutingKind.zipf, rank=3, iteration=9).topk_idx.ravel())
    assert counts.argmax() == other.argmax()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_copies_agree_with_counting_one_by_one(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    experts, tokens, topk = 8, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    row = st.lists(st.integers(-1, experts - 1), min_size=topk, max_size=topk)
    flat = data.draw(st.lists(row, min_size=ranks * tokens, max_size=ranks * tokens))
    idx = np.array(flat, np.int64).reshape(ranks, tokens, topk)
    each, merged = np.zeros((ranks, ranks), int), np.zeros((ranks, ranks), int)
    for source in range(ranks):
        for token in idx[source].tolist():
            owners = [expert // (experts // ranks) for expert in token if expert >= 0]
            for owner in owners:
                each[source, owner] += 1
            for owner in set(owners):
                merged[source, owner] += 1
    assert (copies(idx, experts, ranks, "none") == each).all()
    assert (copies(idx, experts, ranks, "rank") == merged).all()


def test_no_rows_at_all_are_balanced() -> None:
    assert max_over_mean(copies(np.full((2, 3, 2), -1), 8, 2, "rank")) == 1.0


def test_what_nobody_can_write_to_is_counted_once_and_never_taken_for_another() -> None:
    first, second = everyone(RoutingKind.uniform), everyone(RoutingKind.one_hot)
    for idx in (first, second):
        idx.flags.writeable = False
    found = copies(first, 256, 8, "rank")
    assert copies(first, 256, 8, "rank") is found
    assert not found.flags.writeable
    assert (copies(second, 256, 8, "rank") == copies(second.copy(), 256, 8, "rank")).all()
    assert (copies(first, 256, 8, "none") == copies(first.copy(), 256, 8, "none")).all()
    assert (copies(first, 256, 8, "rank") == found).all()
