"""The report on the running requests of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serving.running import INTERVAL_S
from sweeps.read import load
from sweeps.render_markdown import markdown
from sweeps.report import build, of_results
from sweeps.tablefmt import Section, Table
from sweeps.view import view


def lockstep(folder: Path) -> list[Section]:
    return [s for s in build(view(load(folder))) if s.title == "Lockstep"]


def rank(results: Any, trial_id: str, rank: int, **values: Any) -> None:
    row = {"endpoint": f"engine:external_dp:rank{rank}", "engine": rank, "readings": 40,
           "at_work": 40, "idle": 0, "running_mean": 2.0, "running_max": 3,
           "waiting_mean": 0.0, "skew": 1.25}  # fmt: skip
    results.add("lockstep", trial_id, **{**row, **values})


def test_a_line_for_each_cell_of_an_arm_with_several_ranks(results: Any, tmp_path: Path) -> None:
    results.trial("e1", arm="external_dp", shape="1024/256", concurrency=4)
    rank(results, "e1", 0)
    rank(results, "e1", 1, readings=30, at_work=20, idle=5, running_mean=1.256, running_max=5)
    results.trial("w1", shape="1024/256", concurrency=4)
    rank(results, "w1", 0, skew=1.0)
    (section,) = lockstep(results.write(tmp_path))
    text, table = section.blocks
    assert isinstance(text, str)
    assert f"sampled every {INTERVAL_S * 1000:.0f} ms" in text
    assert isinstance(table, Table)
    (row,) = [[cell.text for cell in row] for row in table.rows]
    assert dict(zip(table.columns, row, strict=True)) == {
        "arm": "external_dp", "cell": "1024/256 c1", "ranks": "2", "readings": "30-40",
        "running per rank": "2.00 / 1.26", "most": "5", "waiting per rank": "0.00 / 0.00",
        "idle per rank": "0% / 25%", "skew": "1.25",
    }  # fmt: skip
    assert "| 2.00 / 1.26 |" in markdown("", of_results(tmp_path).full)


def test_a_rank_that_never_answered_is_seen(results: Any, tmp_path: Path) -> None:
    nothing = {"running_mean": None, "running_max": None, "waiting_mean": None, "at_work": 0}
    results.trial("e1", arm="external_dp")
    rank(results, "e1", 0, skew=None)
    rank(results, "e1", 1, readings=0, skew=None, **nothing)
    results.trial("e2", arm="external_dp", repeat=1)
    for silent in (0, 1):
        rank(results, "e2", silent, readings=0, skew=None, **nothing)
    (section,) = lockstep(results.write(tmp_path))
    table = section.blocks[1]
    assert isinstance(table, Table)
    assert [[cell.text for cell in row][1:] for row in table.rows] == [
        ["1024/256 c1, repeat 0", "2", "0-40", "2.00 / -", "3", "0.00 / -", "0% / -", "-"],
        ["1024/256 c1, repeat 1", "2", "0", "", "", "", "", "-"],
    ]


def test_nothing_for_arms_with_one_rank_and_folders_without_the_tables(
    results: Any, tmp_path: Path
) -> None:
    results.trial("w1")
    rank(results, "w1", 0)
    assert lockstep(results.write(tmp_path)) == []
    for name in ("lockstep", "running"):
        (tmp_path / f"{name}.parquet").unlink(missing_ok=True)
    assert lockstep(tmp_path) == []
