"""Processes that must not disturb one another get cores that share nothing, as far as there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ep_ray.cores import apart, seats


def topology(folder: Path, siblings: dict[int, str]) -> Path:
    for core, shared in siblings.items():
        path = folder / f"cpu{core}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{shared}\n")
    return folder


def test_hardware_threads_of_one_core_come_last(tmp_path):
    sysfs = topology(tmp_path, {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"})
    assert apart([3, 2, 1, 0], sysfs) == [0, 2, 1, 3]
    assert apart([1, 2, 3], sysfs) == [1, 2, 3]


def test_cores_without_siblings_keep_their_order(tmp_path):
    sysfs = topology(tmp_path, {4: "4", 7: "7"})
    assert apart([7, 4], sysfs) == [4, 7]
    assert apart([9, 8], tmp_path) == [8, 9]  # nothing is told of them


@pytest.mark.parametrize(
    ("cores", "expected"), [([5], [5, 5, 5]), ([5, 6], [5, 6, 6]), ([5, 6, 7, 8], [5, 6, 7])]
)
def test_the_last_processes_share_where_cores_are_too_few(cores, expected):
    assert seats(3, cores) == expected
