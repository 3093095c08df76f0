"""Result folders that the project keeps stay readable, whatever columns have come since."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sweeps.read import load
from sweeps.report import of_results
from sweeps.tables import ADDED_LATER, TABLES

KEPT = sorted(p.parent for p in (Path(__file__).parents[3] / "results").glob("*/*/trials.parquet"))


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_a_kept_folder_gives_a_report(folder: Path) -> None:
    assert len(load(folder)["trials"])
    assert of_results(folder).full


def test_columns_that_came_later_read_as_null(tmp_path: Path) -> None:
    table = pq.read_table(KEPT[0] / "trials.parquet")
    old = [name for name in table.schema.names if name not in ADDED_LATER]
    pq.write_table(table.select(old), tmp_path / "trials.parquet")
    found = load(tmp_path)["trials"]
    assert found.schema.names == TABLES["trials"].names
    assert found["launch"].null_count == len(found) == len(table)
