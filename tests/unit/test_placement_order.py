"""Ranks get the same places in identical runs, whatever order Ray gives the bundles in."""

from __future__ import annotations

from itertools import permutations

import pytest

from ep_ray.placement import PlacementError, Slot, rank_order
from ep_ray.watchdog import TrialError


def places(slots: list[Slot]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(slots[i].node_ip, slots[i].node_id, slots[i].gpu_ids) for i in rank_order(slots)]


def slot(ip: str, node: str, *gpus: int, bundle: int = 0) -> Slot:
    return Slot(ip, node, tuple(map(str, gpus)), gpus, bundle)


def test_by_node_and_then_by_device_however_bundles_come():
    slots = [slot("10.0.0.9", "b", 0), slot("10.0.0.10", "a", 1), slot("10.0.0.10", "a", 0)]
    expected = [("10.0.0.9", "b", ("0",)), ("10.0.0.10", "a", ("0",)), ("10.0.0.10", "a", ("1",))]
    for order in permutations(slots):
        assert places(list(order)) == expected


def test_addresses_are_compared_as_numbers():
    slots = [slot("10.0.0.100", "x", 0), slot("10.0.0.20", "y", 0), slot("9.255.0.1", "z", 0)]
    assert [place[0] for place in places(slots)] == ["9.255.0.1", "10.0.0.20", "10.0.0.100"]


def test_nodes_with_one_address_are_kept_apart():
    slots = [slot("127.0.0.1", node, gpu) for gpu in (0, 1) for node in ("b", "a")]
    assert [(place[1], place[2]) for place in places(slots)] == [
        ("a", ("0",)), ("a", ("1",)), ("b", ("0",)), ("b", ("1",)),
    ]  # fmt: skip


def test_devices_are_compared_as_numbers():
    slots = [slot("h", "a", gpu) for gpu in (10, 9, 2)]
    assert [place[2] for place in places(slots)] == [("2",), ("9",), ("10",)]


def test_masked_devices_are_told_apart_by_their_ids():
    """A masked process sees its own GPU as index 0."""
    slots = [Slot("h", "a", (gpu,), (0,), bundle) for bundle, gpu in enumerate(["10", "9", "2"])]
    for order in permutations(slots):
        assert [place[2] for place in places(list(order))] == [("2",), ("9",), ("10",)]


def test_tp_groups_are_ordered_by_their_first_device():
    slots = [slot("h", "a", 4, 5), slot("h", "a", 0, 1), slot("h", "a", 2, 3)]
    assert [place[2] for place in places(slots)] == [("0", "1"), ("2", "3"), ("4", "5")]


def test_without_devices_bundles_keep_their_order():
    slots = [slot("h", "a", bundle=bundle) for bundle in (2, 0, 1)]
    assert [slots[i].bundle for i in rank_order(slots)] == [0, 1, 2]


def test_names_that_are_no_numbers_sort_too():
    slots = [Slot("host-b", "b", ("GPU-2",), (1,), 0), Slot("host-b", "b", ("GPU-9",), (0,), 1)]
    assert rank_order(slots) == [1, 0]


def test_a_placement_that_does_not_come_is_a_trial_that_timed_out():
    with pytest.raises(TrialError) as caught:
        raise PlacementError("asked for 8, found 4")
    assert (caught.value.status, caught.value.reason) == ("timeout", "asked for 8, found 4")
