from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ep_ray.a2a.bounds import Links, bound_ns, chance, crossing, expected_bound_ns
from ep_ray.a2a.routing import draw
from ep_ray.backends.base import Dedup, row_bytes
from ep_ray.config.schema import Dtype, RoutingKind

NVLINK, NIC = 450e9, 50e9
ROW = {"dispatch": row_bytes(7168, Dtype.fp8), "combine": row_bytes(7168, Dtype.bf16)}
DEDUPS: tuple[Dedup, ...] = ("node", "rank", "none")
# Microseconds at 8 GPUs per node, 50 GB/s of NIC per GPU, 450 GB/s of NVLink:
# (tokens, operation) -> EP -> one copy per node, per rank, per (token, expert).
ACROSS_NODES = {
    (128, "dispatch"): {
        16: (19, 62, 76),
        32: (51, 103, 114),
        64: (88, 127, 132),
        128: (116, 140, 142),
    },
    (128, "combine"): {
        16: (37, 120, 147),
        32: (99, 200, 220),
        64: (170, 246, 257),
        128: (224, 271, 275),
    },
    (4096, "dispatch"): {
        16: (603, 1975, 2422),
        32: (1641, 3300, 3633),
        64: (2805, 4067, 4239),
        128: (3703, 4479, 4542),
    },
    (4096, "combine"): {
        16: (1170, 3830, 4698),
        32: (3183, 6401, 7046),
        64: (5441, 7888, 8221),
        128: (7182, 8687, 8808),
    },
}


def expected_us(tokens: int, op: str, ep: int, dedup: Dedup, links: Links) -> float:
    bound = expected_bound_ns(
        tokens=tokens, row_bytes=ROW[op], experts=256, topk=8, ep=ep, dedup=dedup, links=links
    )
    assert bound is not None
    return bound / 1e3


@pytest.mark.parametrize(("tokens", "op"), ACROSS_NODES)
@pytest.mark.parametrize("ep", [16, 32, 64, 128])
def test_closed_form_across_nodes(tokens: int, op: str, ep: int) -> None:
    links = Links(8, NVLINK, NIC)
    found = [expected_us(tokens, op, ep, dedup, links) for dedup in DEDUPS]
    assert found == pytest.approx(ACROSS_NODES[tokens, op][ep], abs=0.55)


@pytest.mark.parametrize(
    ("tokens", "op", "per_rank", "per_expert"),
    [
        (128, "dispatch", 9.7, 14.7),
        (128, "combine", 18.9, 28.5),
        (4096, "dispatch", 312, 471),
        (4096, "combine", 605, 913),
    ],
)
def test_closed_form_on_one_node(tokens: int, op: str, per_rank: float, per_expert: float) -> None:
    links = Links(8, NVLINK, None)
    assert expected_us(tokens, op, 8, "rank", links) == pytest.approx(per_rank, rel=0.005)
    assert expected_us(tokens, op, 8, "none", links) == pytest.approx(per_expert, rel=0.005)


@pytest.mark.parametrize(
    ("tokens", "op", "rate", "us"),
    [
        (128, "dispatch", NVLINK, 2.1),
        (128, "combine", NVLINK, 4.1),
        (4096, "dispatch", NVLINK, 67),
        (4096, "combine", NVLINK, 130),
        (4096, "dispatch", 391.6e9, 77),
        (4096, "combine", 391.6e9, 149),
    ],
)
def test_closed_form_at_ep2(tokens: int, op: str, rate: float, us: float) -> None:
    found = expected_us(tokens, op, 2, "rank", Links(2, rate, None))
    assert found == pytest.approx(us, rel=0.02)


def test_chance_of_all_and_of_none() -> None:
    assert chance(256, 256, 8) == 1.0
    assert chance(0, 256, 8) == 0.0


def everyone(kind: RoutingKind, ep: int, tokens: int) -> np.ndarray:
    shape: dict[str, Any] = {"tokens": tokens, "experts": 256, "topk": 8, "ep": ep}
    draws = [draw(kind, seed=0, rank=rank, iteration=0, **shape) for rank in range(ep)]
    return np.stack([routing.topk_idx.numpy() for routing in draws])


@pytest.mark.parametrize("dedup", DEDUPS)
def test_actual_uniform_routing_nears_the_closed_form(dedup: Dedup) -> None:
    links = Links(8, NVLINK, NIC)
    rows = crossing(everyone(RoutingKind.uniform, 16, 4096), 256, dedup, 8)
    bound = bound_ns(rows, ROW["dispatch"], links)
    assert bound is not None
    expected = expected_us(4096, "dispatch", 16, dedup, links)
    assert expected * 0.999 < bound / 1e3 < expected * 1.03


def test_one_hot_is_bound_by_what_enters_the_hot_rank() -> None:
    rows = crossing(everyone(RoutingKind.one_hot, 4, 10), 256, "rank", 4)
    assert bound_ns(rows, 100, Links(4, 1e9, None)) == pytest.approx(3 * 10 * 100)


def test_one_copy_per_node_is_handed_on_by_the_source_s_counterpart() -> None:
    # Rank 0 of two nodes of two sends one token to ranks 2 and 3: one row to its counterpart 2,
    # which hands it on to 3. The token of rank 3 stays with rank 2, its neighbour.
    idx = np.full((4, 1, 2), -1)
    idx[0, 0], idx[3, 0, 0] = (2, 3), 2
    found = crossing(idx, 4, "node", 2)
    assert found.inter.nonzero() == (np.array([0]), np.array([2]))
    assert found.inter[0, 2] == 1
    assert found.intra[2, 3] == 1
    assert found.intra[3, 2] == 1
    assert found.intra.sum() == 2


def test_one_copy_per_node_reaches_a_relay_that_keeps_none() -> None:
    # Rank 0's token is for rank 3 alone: it still enters that node through rank 2.
    idx = np.full((4, 1, 1), -1)
    idx[0, 0] = 3
    found = crossing(idx, 4, "node", 2)
    assert found.inter[0, 2] == 1
    assert found.intra[2, 3] == 1


def test_ep1_has_no_bound() -> None:
    rows = crossing(everyone(RoutingKind.uniform, 1, 10), 256, "rank", 1)
    assert rows.intra.sum() + rows.inter.sum() == 0
    assert bound_ns(rows, 100, Links(1, None, None)) is None
    none = Links(1, None, None)
    assert (
        expected_bound_ns(tokens=1, row_bytes=1, experts=8, topk=1, ep=1, dedup="rank", links=none)
        is None
    )
