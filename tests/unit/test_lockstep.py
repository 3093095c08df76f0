"""Running requests of ranks: means, idle shares and skew against values worked out by hand."""

from __future__ import annotations

import pytest

from serving.load.records import CellRecord, clock_offset_ns
from serving.running import Reading
from sweeps.lockstep import lockstep_rows, lockstep_tables

A, B = ("a", 0), ("b", 1)
SECOND = 1_000_000_000


def readings(*askings: dict[tuple[str, int | None], tuple[int, int]]) -> list[Reading]:
    """Readings at 0, 1, 2, ... ns: (running, waiting) of each engine that answered."""
    return [
        Reading(*engine, at_ns, *counts)
        for at_ns, answers in enumerate(askings)
        for engine, counts in answers.items()
    ]


def test_means_idle_and_skew_of_two_ranks():
    found = lockstep_rows(
        readings(
            {A: (4, 1), B: (2, 0)},
            {A: (3, 0), B: (0, 0)},
            {A: (0, 0), B: (0, 1)},  # b holds one: the group has work, and neither runs any
            {A: (0, 0), B: (0, 0)},  # no work: nobody is idle in it
        ),
        [A, B],
    )
    # Largest batches 4 + 3 over mean batches 3 + 1.5.
    skew = {"skew": pytest.approx(7 / 4.5)}
    assert found == [
        {"endpoint": "a", "engine": 0, "readings": 4, "at_work": 3, "idle": 1,
         "running_mean": 7 / 4, "running_max": 4, "waiting_mean": 1 / 4} | skew,
        {"endpoint": "b", "engine": 1, "readings": 4, "at_work": 3, "idle": 2,
         "running_mean": 2 / 4, "running_max": 2, "waiting_mean": 1 / 4} | skew,
    ]  # fmt: skip


def test_one_request_on_four_ranks_leaves_three_idle():
    ranks = [(f"rank{i}", i) for i in range(4)]
    one_at_a_time = [{rank: (int(rank == busy), 0) for rank in ranks} for busy in ranks]
    found = lockstep_rows(readings(*one_at_a_time), ranks)
    assert [(row["at_work"], row["idle"], row["running_mean"]) for row in found] == [
        (4, 3, 0.25)
    ] * 4
    assert {row["skew"] for row in found} == {4.0}


def test_even_ranks_have_a_skew_of_one_whatever_the_load():
    found = lockstep_rows(readings({A: (1, 0), B: (1, 0)}, {A: (9, 0), B: (9, 0)}), [A, B])
    assert [(row["idle"], row["skew"]) for row in found] == [(0, 1.0)] * 2


def test_a_reading_that_lacks_a_rank_counts_for_those_that_answered():
    found = lockstep_rows(readings({A: (2, 0), B: (2, 0)}, {A: (6, 0)}, {B: (0, 0)}), [A, B])
    counts = [(r["readings"], r["at_work"], r["idle"], r["running_mean"]) for r in found]
    # The last reading says nothing of work: the rank that might have some did not answer.
    assert counts == [(2, 2, 0, 4.0), (2, 1, 0, 1.0)]
    assert {row["skew"] for row in found} == {1.0}


def test_a_rank_that_never_answered_has_no_figures_and_leaves_the_skew_open():
    (_, silent) = lockstep_rows(readings({A: (2, 0)}), [A, ("b", None)])
    assert silent == {
        "endpoint": "b", "engine": None, "readings": 0, "at_work": 0, "idle": 0,
        "running_mean": None, "running_max": None, "waiting_mean": None, "skew": None,
    }  # fmt: skip


def test_nothing_that_ran_has_no_skew():
    (row, _) = lockstep_rows(readings({A: (0, 0), B: (0, 3)}), [A, B])
    assert (row["at_work"], row["idle"], row["skew"]) == (1, 1, None)


def record(first_sent_ns: int | None, wall_ns: int, clock_offset: int) -> CellRecord:
    return CellRecord(wall_ns, first_sent_ns, 1, 0, 0, 0, clock_offset, False, [])


def test_only_the_measured_part_counts_and_the_client_may_be_on_another_host():
    ahead_ns = 5000 * SECOND  # of the client's CLOCK_MONOTONIC
    read = [Reading("a", 0, second * SECOND, second, 0) for second in range(10)]
    read += [Reading("b", 2, 4 * SECOND, 7, 0), Reading("b", 1, 4 * SECOND, 6, 0)]
    # From 2.5 s to 6.5 s of this host's clock: the readings at 3, 4, 5 and 6 s.
    cell = record(2 * SECOND + SECOND // 2 + ahead_ns, 4 * SECOND, clock_offset_ns() - ahead_ns)
    tables = lockstep_tables(read, cell, ["a", "c", "b"])
    assert [(r["endpoint"], r["engine"], r["readings"]) for r in tables["lockstep"]] == [
        ("a", 0, 4), ("c", None, 0), ("b", 1, 1), ("b", 2, 1),
    ]  # fmt: skip
    assert tables["lockstep"][0]["running_mean"] == 4.5
    assert [row["running"] for row in tables["running"]] == [*range(10), 7, 6], "warm-up is kept"
    # The clocks were read apart, some microseconds after each other.
    assert tables["running"][3]["monotonic_ns"] == pytest.approx(
        3 * SECOND + ahead_ns, abs=SECOND // 10
    )


def test_no_rows_where_nothing_was_read_or_sent():
    assert lockstep_tables([], record(0, SECOND, 0), ["a"]) == {}
    assert lockstep_tables(readings({A: (1, 0)}), record(None, 0, 0), ["a"]) == {}
