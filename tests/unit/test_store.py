"""The store: nothing finished is lost, nothing is doubled, whatever is cut off."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ep_ray.config.errors import ConfigError
from sweeps import store as store_module
from sweeps.store import Store, read_all
from sweeps.tables import SCHEMA_VERSION, TABLES

SAMPLES_PER_TRIAL = 6


def trial(trial_id: str, status: str = "ok") -> dict[str, Any]:
    return {"trial_id": trial_id, "experiment": "e", "status": status, "duration_ns": 5}


def samples(first: int, count: int = SAMPLES_PER_TRIAL) -> pa.Table:
    return pa.table(
        {
            "op": ["pair"] * count,
            "role": ["measured"] * count,
            "rank": np.zeros(count, np.int32),
            "iteration": np.arange(count, dtype=np.int32),
            "duration_ns": np.arange(first, first + count, dtype=np.int64),
        }
    )


def append(store: Store, trial_id: str, first: int, status: str = "ok") -> None:
    ledger = [{"endpoint": "rank0", "role": "all", "agrees": True}]
    store.append(trial(trial_id, status), {"samples": samples(first), "ledger": ledger})


def durations(folder: Path, trial_id: str, attempt: int = 1) -> list[int]:
    table = read_all(folder)["samples"].to_pylist()
    mine = [r for r in table if (r["trial_id"], r["attempt"]) == (trial_id, attempt)]
    return [row["duration_ns"] for row in mine]


def abandon(store: Store) -> None:
    """Ends a store as a killed process does: what was flushed stays, the lock goes."""
    store._lock.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "e-1"
    path.mkdir()
    return path


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    found = Store(folder)
    yield found
    found._lock.close()


def test_rows_come_back_as_they_were_written(store, folder):
    append(store, "a", 100)
    append(store, "b", 200, "failed")
    store.close()
    tables = {name: pq.read_table(folder / f"{name}.parquet") for name in TABLES}
    rows = tables["trials"].to_pylist()
    assert [(r["trial_id"], r["attempt"], r["status"]) for r in rows] == [
        ("a", 1, "ok"), ("b", 1, "failed"),
    ]  # fmt: skip
    assert {r["sweep_id"] for r in rows} == {"e-1"}
    assert rows[0]["arm"] is None
    assert tables["samples"]["duration_ns"].to_pylist() == [*range(100, 106), *range(200, 206)]
    assert tables["ledger"].num_rows == 2
    assert tables["requests"].num_rows == 0


def test_every_parquet_has_its_schema_and_the_version(store, folder):
    append(store, "a", 0)
    store.close()
    for name, schema in TABLES.items():
        found = pq.read_schema(folder / f"{name}.parquet")
        assert found.equals(schema)
        assert found.metadata[b"ep_ray_schema_version"] == SCHEMA_VERSION.encode()


def test_nothing_but_tables_is_left_after_the_end(store, folder):
    append(store, "a", 0)
    store.add_plan("e", ["a"])
    store.close()
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted([".lock", "sweep.json", *(f"{name}.parquet" for name in TABLES)])


def test_duckdb_reads_a_folder_in_one_line(store, folder):
    append(store, "a", 10)
    append(store, "b", 20)
    store.close()
    (row,) = duckdb.sql(
        "SELECT arg_max(trial_id, duration_ns), median(duration_ns) "
        f"FROM '{folder}/samples.parquet'"
    ).fetchall()
    assert row == ("b", 17.5)
    joined = duckdb.sql(
        f"SELECT count(*) FROM '{folder}/trials.parquet' JOIN '{folder}/samples.parquet' "
        "USING (trial_id, attempt) WHERE status = 'ok'"
    ).fetchall()
    assert joined == [(12,)]


def test_unfinished_sweeps_can_be_read(store, folder):
    append(store, "a", 10)
    assert durations(folder, "a") == list(range(10, 16))
    assert read_all(folder)["trials"]["status"].to_pylist() == ["ok"]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """A sweep of three trials whose process was killed, and where each ends in the streams."""
    folder = tmp_path_factory.mktemp("whole")
    store = Store(folder)
    ends: dict[str, list[int]] = {"trials": [], "samples": [], "ledger": []}
    for number in range(3):
        append(store, f"t{number}", number * 10)
        for name, (file, _) in store._writers.items():
            ends[name].append(file.tell())
    abandon(store)
    return folder, ends


@pytest.mark.parametrize("table", ["trials", "samples", "ledger"])
def test_a_stream_cut_off_at_any_byte_gives_its_complete_batches(three, tmp_path, table):
    folder, ends = three
    (stream,) = (folder / "stream").glob(f"{table}-*.arrows")
    data, cut_off = stream.read_bytes(), tmp_path / "cut.arrows"
    found = []
    for cut in range(len(data) + 1):
        cut_off.write_bytes(data[:cut])
        rows = store_module._read_stream(cut_off, TABLES[table])
        found.append(rows["trial_id"].unique().to_pylist())
    expected = [sum(cut >= end for end in ends[table]) for cut in range(len(data) + 1)]
    assert found == [[f"t{number}" for number in range(complete)] for complete in expected]


@pytest.mark.parametrize("table", ["trials", "samples", "ledger"])
def test_a_resumed_sweep_keeps_what_was_complete_and_goes_on(three, tmp_path, table):
    folder, ends = three
    for complete, end in enumerate(ends[table]):
        copy = shutil.copytree(folder, tmp_path / f"{table}{complete}")
        (stream,) = (copy / "stream").glob(f"{table}-*.arrows")
        stream.write_bytes(stream.read_bytes()[: end - 1])
        store = Store(copy)
        assert len(store.statuses()) == (complete if table == "trials" else 3)
        append(store, "new", 500)
        store.close()
        assert durations(copy, "new") == list(range(500, 506))
        kept = read_all(copy)["samples"].num_rows // SAMPLES_PER_TRIAL - 1
        assert kept == (3 if table == "ledger" else complete)


def test_the_commit_mark_is_written_after_what_it_stands_for(store, monkeypatch):
    synced = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").rsplit("/")[-1].split("-")[0])
        real(descriptor)

    append(store, "a", 0)  # makes the streams
    monkeypatch.setattr(os, "fsync", note)
    append(store, "b", 0)
    assert sorted(synced[:2]) == ["ledger", "samples"]
    assert synced[2:] == ["trials"]


def test_rows_without_a_commit_mark_are_dropped(store, folder):
    append(store, "a", 0)
    orphan = store_module._with_key(samples(900), {"trial_id": "b", "attempt": 1}, "samples")
    store._write("samples", orphan)
    assert durations(folder, "b") == []
    store.close()
    assert set(pq.read_table(folder / "samples.parquet")["trial_id"].to_pylist()) == {"a"}


def test_the_rows_of_a_cut_off_attempt_do_not_stand_for_the_next(folder):
    """A crash between a trial's samples and its commit mark; then the sweep is resumed."""
    first = Store(folder)
    orphan = store_module._with_key(samples(900), {"trial_id": "a", "attempt": 1}, "samples")
    first._write("samples", orphan)
    abandon(first)
    second = Store(folder)
    append(second, "a", 100)
    second.close()
    assert durations(folder, "a") == list(range(100, 106))


class CrashError(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("survived", range(len(TABLES) + 1))
def test_a_crash_while_tables_are_replaced_loses_and_doubles_nothing(folder, monkeypatch, survived):
    store = Store(folder)
    append(store, "a", 100)
    append(store, "b", 200)
    replaced = 0
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        nonlocal replaced
        if replaced == survived:
            raise CrashError
        replaced += 1
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    if survived < len(TABLES):
        with pytest.raises(CrashError):
            store.finalise()
    else:
        store.finalise()
    monkeypatch.undo()
    abandon(store)
    again = Store(folder)
    append(again, "c", 300)
    again.close()
    assert durations(folder, "a") == list(range(100, 106))
    assert durations(folder, "b") == list(range(200, 206))
    assert durations(folder, "c") == list(range(300, 306))
    assert read_all(folder)["trials"].num_rows == 3
    assert read_all(folder)["ledger"].num_rows == 3
    assert not list(folder.glob("*.tmp-*"))
    assert not (folder / "stream").exists()


def test_a_crash_while_streams_are_removed_doubles_nothing(folder, monkeypatch):
    store = Store(folder)
    append(store, "a", 100)
    real = Path.unlink
    removed = []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if removed:
            raise CrashError
        removed.append(path)
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(CrashError):
        store.finalise()
    monkeypatch.undo()
    abandon(store)
    Store(folder).close()
    assert durations(folder, "a") == list(range(100, 106))
    assert read_all(folder)["trials"].num_rows == 1


def test_finalising_twice_changes_nothing(store, folder):
    append(store, "a", 1)
    store.finalise()
    before = {path.name: path.read_bytes() for path in folder.glob("*.parquet")}
    store.finalise()
    assert {path.name: path.read_bytes() for path in folder.glob("*.parquet")} == before
    append(store, "b", 50)
    store.finalise()
    assert durations(folder, "a") == list(range(1, 7))
    assert durations(folder, "b") == list(range(50, 56))


def test_attempts_are_counted_on_over_sessions(folder):
    first = Store(folder)
    append(first, "a", 1, "timeout")
    append(first, "b", 2)
    assert (first.is_done("a"), first.is_done("b"), first.is_done("c")) == (False, True, False)
    first.close()
    second = Store(folder)
    assert second.statuses() == {"a": "timeout", "b": "ok"}
    append(second, "a", 30)
    assert second.statuses() == {"a": "ok", "b": "ok"}
    second.close()
    assert durations(folder, "a", 1) == list(range(1, 7))
    assert durations(folder, "a", 2) == list(range(30, 36))
    third = Store(folder)
    assert third.is_done("a")
    abandon(third)


@pytest.mark.parametrize(
    "rows",
    [
        {"ledger": [{"endpoint": "x"}, {"endpoint": "y", "colour": "red"}]},
        {"samples": samples(0).append_column("colour", [["red"] * SAMPLES_PER_TRIAL])},
    ],
)
def test_columns_that_a_table_does_not_have_are_refused(store, folder, rows):
    with pytest.raises(ValueError, match=r"has no columns \['colour'\]"):
        store.append(trial("a"), {"cells": [{"wall_ns": 1}], **rows})
    assert read_all(folder)["trials"].num_rows == 0
    append(store, "a", 7)
    store.close()
    tables = read_all(folder)
    assert tables["cells"].num_rows == 0, "what was refused left a row behind"
    assert tables["ledger"].num_rows == 1


def test_columns_of_a_trial_that_do_not_exist_are_refused(store, folder):
    with pytest.raises(ValueError, match=r"table trials has no columns \['tpp'\]"):
        store.append({**trial("a"), "tpp": 1}, {"samples": samples(0)})
    store.close()
    assert read_all(folder)["samples"].num_rows == 0


def _try_to_open(folder: Path, answer: Any) -> None:
    try:
        Store(folder)
    except ConfigError as error:
        answer.put(str(error))
    else:
        answer.put("opened")


def test_a_folder_has_one_writer(store, folder):
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_try_to_open, args=(folder, answer))
    process.start()
    message = answer.get(timeout=60)
    process.join(60)
    assert message == (
        f"another sweep is writing to {folder}: wait for it, or choose results=FOLDER"
    )
    store.close()
    Store(folder).close()


def test_folders_made_in_the_same_second_are_apart(tmp_path):
    stores = [Store.create(tmp_path / "runs", "e") for _ in range(3)]
    names = [store.sweep_id for store in stores]
    assert len(set(names)) == 3
    assert all(name.startswith("e-") for name in names)
    assert stores[0].folder.is_absolute()
    for store in stores:
        store.close()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write results to .*file: Not a directory"):
        Store.create(tmp_path / "file", "e")


def test_the_plan_grows_and_is_read_back(store, folder):
    assert store.plan_ids() == set()
    store.add_plan("e", ["b", "a"])
    store.add_plan("e", ["c", "a"])
    assert store.plan_ids() == {"a", "b", "c"}
    manifest = json.loads((folder / "sweep.json").read_text())
    assert manifest["trial_ids"] == ["a", "b", "c"]
    assert manifest["schema_version"] == SCHEMA_VERSION


def test_only_the_folder_of_a_sweep_is_resumed(store, folder):
    with pytest.raises(ConfigError, match=r"no sweep there$"):
        Store.open(folder)
    store.add_plan("e", ["a"])
    store.close()
    Store.open(folder).close()
    with pytest.raises(ConfigError, match=r"no sweep there; in .* there are e-1"):
        Store.open(folder.parent / "e-2")


def test_a_sweep_of_another_schema_version_is_not_resumed(store, folder):
    store.add_plan("e", ["a"])
    store.close()
    text = (folder / "sweep.json").read_text()
    (folder / "sweep.json").write_text(text.replace(f'"{SCHEMA_VERSION}"', '"0"', 1))
    with pytest.raises(ConfigError, match="schema version 0, this ep-ray writes"):
        Store.open(folder)


def test_a_copied_folder_resumes(store, folder, tmp_path):
    append(store, "a", 5)
    copy = shutil.copytree(folder, tmp_path / "copy")
    other = Store(copy)
    assert other.is_done("a")
    append(other, "b", 6)
    other.close()
    assert durations(copy, "a") == list(range(5, 11))
