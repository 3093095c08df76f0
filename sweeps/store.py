"""Writes a sweep's tables so that nothing finished is ever lost.

While a sweep runs, every attempt of a trial is appended to Arrow IPC streams: a stream that
is cut off keeps its complete batches. The row in `trials` is written last and is the commit
mark: rows of other tables without it are dropped. `finalise` turns the streams into one
Parquet file per table, each replaced atomically; a crash in between loses and doubles nothing,
because rows are told apart by (trial_id, attempt).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ep_ray.config.errors import ConfigError
from ep_ray.interrupt import uninterrupted
from sweeps.folder import no_folder, occupy, replacing, sync_folder, writing
from sweeps.tables import SCHEMA_VERSION, TABLES

# Rows of a table without the key: dicts, or an Arrow table where there are many.
Rows = Mapping[str, Sequence[Mapping[str, Any]] | pa.Table]
_MANIFEST = "sweep.json"
_STREAMS = "stream"


class Store:
    """The folder of one sweep, open for writing by one process.

    Attributes:
        folder: Where everything of the sweep lies.
        sweep_id: Name of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sweep_id = folder.name
        self._lock = occupy(folder)
        self._segment = f"{time.time_ns()}-{os.getpid()}"
        self._writers: dict[str, tuple[IO[bytes], Any]] = {}
        self._unsynced: set[IO[bytes]] = set()
        self._attempts: dict[str, list[str]] = defaultdict(list)
        # Rows of an attempt that a crash cut off go now: the next attempt takes its number.
        self.finalise()
        trials = read_all(folder)["trials"].select(["trial_id", "status"]).to_pylist()
        for row in trials:
            self._attempts[row["trial_id"]].append(row["status"])

    @classmethod
    def create(cls, root: Path, name: str) -> Store:
        """Makes a new folder `root/name-DATE-TIME`.

        Raises:
            ConfigError: It cannot be made, or takes no data.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for suffix in ["", *(f"-{n}" for n in range(1, 1000))]:
            folder = root / f"{name}-{stamp}{suffix}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(no_folder(root, error.strerror or str(error))) from error
            try:
                return cls(folder.resolve())
            except ConfigError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        raise ConfigError(no_folder(root, "there are 1,000 of this second already"))

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Opens the folder of an earlier sweep, to resume it.

        Raises:
            ConfigError: No such folder, no sweep in it, one of another schema version, it takes
                no data, or another process writes there.
        """
        if not (folder / _MANIFEST).is_file():
            near = sorted(p.parent.name for p in folder.parent.glob(f"*/{_MANIFEST}"))[-3:]
            raise ConfigError(
                f"resume={folder}: no sweep there"
                + (f"; in {folder.parent} there are {', '.join(near)}" if near else "")
            )
        found = json.loads((folder / _MANIFEST).read_text()).get("schema_version")
        if found != SCHEMA_VERSION:
            raise ConfigError(
                f"resume={folder}: its tables have schema version {found}, this ep-ray writes "
                f"{SCHEMA_VERSION}; resume with the ep-ray that began it, or start anew"
            )
        return cls(folder.resolve())

    def plan_ids(self) -> set[str]:
        """Trials that any run of this sweep planned."""
        path = self.folder / _MANIFEST
        if not path.is_file():
            return set()
        return set(json.loads(path.read_text())["trial_ids"])

    def add_plan(self, experiment: str, trial_ids: Sequence[str]) -> None:
        """Notes what is planned, so that a resumed sweep can tell whether it fits."""
        ids = sorted(self.plan_ids() | set(trial_ids))
        body = {"schema_version": SCHEMA_VERSION, "experiment": experiment, "trial_ids": ids}
        with writing(self.folder), replacing(self.folder / _MANIFEST) as temporary:
            temporary.write_text(json.dumps(body, indent=1) + "\n")

    def is_done(self, trial_id: str) -> bool:
        """Whether an attempt of the trial succeeded."""
        return "ok" in self._attempts.get(trial_id, [])

    def statuses(self) -> dict[str, str]:
        """Status of each trial's last attempt."""
        return {trial: attempts[-1] for trial, attempts in self._attempts.items() if attempts}

    def append(self, trial: Mapping[str, Any], rows: Rows) -> None:
        """Writes one attempt of a trial; the trial's own row last.

        Args:
            trial: Columns of the `trials` table without `attempt` and `sweep_id`.
            rows: Rows of the other tables without `trial_id` and `attempt`.

        Raises:
            SweepError: They cannot be written, for example because the disk is full.
        """
        with uninterrupted(), writing(self.folder):
            self._append(trial, rows)

    def _append(self, trial: Mapping[str, Any], rows: Rows) -> None:
        trial_id = trial["trial_id"]
        key = {"trial_id": trial_id, "attempt": len(self._attempts[trial_id]) + 1}
        commit = _with_key([{**trial, "sweep_id": self.sweep_id}], key, "trials")
        tables = {name: _with_key(entries, key, name) for name, entries in rows.items()}
        for name, table in tables.items():
            self._write(name, table)
        self._sync()  # the commit mark must not reach the disk before what it stands for
        self._write("trials", commit)
        self._sync()
        self._attempts[trial_id].append(trial["status"])

    def add(self, trial_id: str, rows: Rows) -> None:
        """Writes further rows of a trial's last attempt, which has ended; nothing if it has not.

        Raises:
            SweepError: They cannot be written.
        """
        if not self._attempts[trial_id]:
            return
        key = {"trial_id": trial_id, "attempt": len(self._attempts[trial_id])}
        with uninterrupted(), writing(self.folder):
            for name, entries in rows.items():
                self._write(name, _with_key(entries, key, name))
            self._sync()

    def _write(self, name: str, table: pa.Table) -> None:
        if not table.num_rows:
            return
        file, writer = self._writer(name, TABLES[name])
        writer.write_table(table)
        file.flush()
        self._unsynced.add(file)

    def _sync(self) -> None:
        while self._unsynced:
            os.fsync(self._unsynced.pop().fileno())

    def _writer(self, name: str, schema: pa.Schema) -> tuple[IO[bytes], Any]:
        if name not in self._writers:
            folder = self.folder / _STREAMS
            folder.mkdir(exist_ok=True)
            file = open(folder / f"{name}-{self._segment}.arrows", "wb")  # noqa: SIM115
            self._writers[name] = (file, pa.ipc.new_stream(file, schema))
        return self._writers[name]

    def finalise(self) -> None:
        """Writes the Parquet files and removes the streams they came from.

        Raises:
            SweepError: They cannot be written; the streams stay, and `resume` reads them.
        """
        streams = list((self.folder / _STREAMS).glob("*.arrows"))
        if not streams and all((self.folder / f"{name}.parquet").is_file() for name in TABLES):
            return
        with uninterrupted(), writing(self.folder):
            self._finalise(streams)

    def _finalise(self, streams: Sequence[Path]) -> None:
        for file, writer in self._writers.values():
            writer.close()
            file.close()
        self._writers.clear()
        for name, table in read_all(self.folder).items():
            _write_parquet(self.folder / f"{name}.parquet", table)
        sync_folder(self.folder)  # the new names must be on the disk before the streams leave it
        for stream in streams:
            stream.unlink()
        if (self.folder / _STREAMS).is_dir():
            (self.folder / _STREAMS).rmdir()

    def close(self) -> None:
        """Finalises and gives the folder free."""
        try:
            self.finalise()
        finally:
            self._lock.close()


def _with_key(
    entries: Sequence[Mapping[str, Any]] | pa.Table, key: Mapping[str, Any], name: str
) -> pa.Table:
    schema = TABLES[name]
    if isinstance(entries, pa.Table):
        _refuse_unknown(name, entries.schema.names)
        for column, value in key.items():
            entries = entries.append_column(column, pa.repeat(pa.scalar(value), len(entries)))
        return entries.select(schema.names).cast(schema)
    _refuse_unknown(name, (column for entry in entries for column in entry))
    return pa.Table.from_pylist([{**entry, **key} for entry in entries], schema=schema)


def _refuse_unknown(name: str, columns: Iterable[str]) -> None:
    unknown = set(columns) - set(TABLES[name].names)
    if unknown:
        raise ValueError(f"table {name} has no columns {sorted(unknown)}")


def read_all(folder: Path) -> dict[str, pa.Table]:
    """Every table of a sweep, finished or not: Parquet plus what the streams hold beyond it.

    Rows of trials that never got their row in `trials` are left out.
    """
    tables = {name: _read(folder, name) for name in TABLES}
    committed = _attempts(tables["trials"])
    return {
        name: table if name == "trials" else table.filter(_among(table, committed))
        for name, table in tables.items()
    }


def _read(folder: Path, name: str) -> pa.Table:
    schema = TABLES[name]
    parquet = folder / f"{name}.parquet"
    table = pq.read_table(parquet).cast(schema) if parquet.is_file() else schema.empty_table()
    for stream in sorted((folder / _STREAMS).glob(f"{name}-[0-9]*.arrows")):
        found = _read_stream(stream, schema)
        fresh = found.filter(pc.invert(_among(found, _attempts(table))))
        table = pa.concat_tables([table, fresh])
    return table


def _read_stream(path: Path, schema: pa.Schema) -> pa.Table:
    batches = []
    try:
        with pa.ipc.open_stream(path) as reader:
            while True:
                batches.append(reader.read_next_batch())
    except (StopIteration, pa.ArrowInvalid, OSError):
        pass  # the end of the stream, or where a crash cut it off
    return pa.Table.from_batches(batches, schema=schema)


def _among(table: pa.Table, attempts: pa.Array) -> pa.ChunkedArray:
    """For each row, whether it belongs to one of `attempts`."""
    return pc.is_in(_keys(table), value_set=attempts)


def _attempts(table: pa.Table) -> pa.Array:
    return pc.unique(_keys(table))


def _keys(table: pa.Table) -> pa.ChunkedArray:
    attempts = pc.cast(table["attempt"], pa.string())
    return pc.binary_join_element_wise(table["trial_id"], attempts, "\n")


def _write_parquet(path: Path, table: pa.Table) -> None:
    integers = [f.name for f in table.schema if pa.types.is_int64(f.type)]
    strings = [f.name for f in table.schema if pa.types.is_string(f.type)]
    with replacing(path) as temporary:
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            use_dictionary=strings,
            column_encoding=dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
        )
