"""Reading a results folder: one Parquet file per table, the last attempt of each trial."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sweeps.tables import ADDED_LATER, SCHEMA_VERSION, TABLES

_VERSION_KEY = b"ep_ray_schema_version"


class ResultsError(Exception):
    """A results folder that cannot be read; the message says what to do."""


def load(results_dir: str | Path) -> dict[str, pa.Table]:
    """All tables of a sweep, by name, with only the last attempt of every trial.

    A table without a file is empty, except `trials`, which every sweep writes.

    Raises:
        ResultsError: The folder is missing, is not a results folder, or is of another version.
    """
    folder = Path(results_dir)
    _require_results(folder)
    tables = {name: _read(folder / f"{name}.parquet", TABLES[name]) for name in TABLES}
    return keep_last_attempts(tables)


def keep_last_attempts(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """Drop rows of superseded attempts, and rows of trials that never got their trials row."""
    last: dict[str, int] = {}
    trials = tables["trials"]
    keys = zip(trials["trial_id"].to_pylist(), trials["attempt"].to_pylist(), strict=True)
    for trial_id, attempt in keys:
        last[trial_id] = max(attempt, last.get(trial_id, attempt))
    wanted = pa.array([_key(t, a) for t, a in last.items()], pa.string())
    return {name: table.filter(_in_keys(table, wanted)) for name, table in tables.items()}


def _key(trial_id: str, attempt: int) -> str:
    return f"{trial_id}\n{attempt}"


def _in_keys(table: pa.Table, wanted: pa.Array) -> pa.ChunkedArray:
    attempt = pc.cast(table["attempt"], pa.string())
    return pc.is_in(pc.binary_join_element_wise(table["trial_id"], attempt, "\n"), value_set=wanted)


def _require_results(folder: Path) -> None:
    if not folder.is_dir():
        raise ResultsError(
            f"asked to report on '{folder}', but there is no such folder. "
            "Give the folder that `python -m ep_ray.sweep` named at its end."
        )
    if (folder / "trials.parquet").is_file():
        return
    inner = sorted(p.parent.name for p in folder.glob("*/trials.parquet"))
    hint = (
        f"These folders in it are: {', '.join(inner)}. Give one of them."
        if inner
        else "Give a folder that `python -m ep_ray.sweep` wrote."
    )
    raise ResultsError(f"'{folder}' is not a results folder: it has no trials.parquet. {hint}")


def _read(path: Path, schema: pa.Schema) -> pa.Table:
    if not path.is_file():
        return schema.empty_table()
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ResultsError(
            f"'{path}' is not a readable Parquet file ({error}). Run the sweep again with "
            "`resume` set to this folder."
        ) from error
    _require_version(path, table.schema)
    absent = [name for name in schema.names if name not in table.schema.names]
    missing = [name for name in absent if name not in ADDED_LATER]
    if missing:
        raise ResultsError(f"'{path}' lacks the columns {', '.join(missing)}: it is incomplete.")
    for name in absent:
        table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
    return table.select(schema.names).cast(schema)


def _require_version(path: Path, schema: pa.Schema) -> None:
    found = (schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if found != SCHEMA_VERSION:
        raise ResultsError(
            f"'{path}' has schema version {found}, this ep-ray reads version {SCHEMA_VERSION}. "
            "Report on it with the ep-ray that wrote it, or run the sweep again."
        )
