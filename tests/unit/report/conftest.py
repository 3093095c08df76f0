"""Results folders for the tests of the report: rows with defaults, written as Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sweeps.tables import TABLES

MS = 1_000_000
Row = dict[str, Any]


class Results:
    """Rows of the tables of one sweep, by table name."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {name: [] for name in TABLES}

    def trial(self, trial_id: str, **values: Any) -> None:
        """Add a trial; started in the order of these calls."""
        defaults: Row = {
            "trial_id": trial_id,
            "attempt": 0,
            "experiment": "demo",
            "measure": "serving",
            "arm": "wide_tp",
            "cell": "1024/256 c1",
            "repeat": 0,
            "status": "ok",
            "started_unix_ns": len(self.rows["trials"]),
            "device": "CPU model",
            "transport_status": "proved",
            "versions_json": json.dumps({"vllm": "0.30.0"}),
            "hardware_json": json.dumps({"cpus": 2}),
        }
        self.rows["trials"].append({**defaults, **values})

    def serving(self, trial_id: str, requests: list[Row], wall_ns: int, **cell: Any) -> None:
        """Add a serving cell with its requests."""
        key = {"trial_id": trial_id, "attempt": cell.pop("attempt", 0)}
        self.rows["cells"].append({**key, "wall_ns": wall_ns, **cell})
        self.rows["requests"] += [{**key, **request} for request in requests]

    def add(self, table: str, trial_id: str, **values: Any) -> None:
        """Add one row to any table."""
        self.rows[table].append({"trial_id": trial_id, "attempt": 0, **values})

    @staticmethod
    def request(sent_ms: float, chunk_ms: list[float], tokens: list[int], **values: Any) -> Row:
        """A request whose chunks arrive at `chunk_ms` (absolute, like `sent_ms`)."""
        return _request(sent_ms, chunk_ms, tokens, **values)

    def write(self, folder: Path) -> Path:
        """Write all tables that have rows, and `trials`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in self.rows.items():
            if rows or name == "trials":
                pq.write_table(_table(name, rows), folder / f"{name}.parquet")
        return folder


def _table(name: str, rows: list[Row]) -> pa.Table:
    """Rows as a table of its schema; absent columns are null."""
    schema = TABLES[name]
    complete = [{column: row.get(column) for column in schema.names} for row in rows]
    return pa.Table.from_pylist(complete, schema=schema)


def _request(sent_ms: float, chunk_ms: list[float], tokens: list[int], **values: Any) -> Row:
    """A request whose chunks arrive at `chunk_ms` (absolute, like `sent_ms`)."""
    chunk_ns = [round(at * MS) for at in chunk_ms]
    defaults: Row = {
        "request_id": "r",
        "endpoint": None,
        "reason": "",
        "http_status": 200,
        "finish_reason": "length",
        "intended_ns": round(sent_ms * MS),
        "role": "measured",
        "state": "complete",
        "prompt_tokens": 1024,
        "completion_tokens": sum(tokens),
        "completion_tokens_source": "usage",
        "token_rule": "continuous_usage",
        "sent_ns": round(sent_ms * MS),
        "end_ns": chunk_ns[-1] if chunk_ns else round(sent_ms * MS),
        "chunk_ns": chunk_ns,
        "chunk_tokens": tokens,
    }
    return {**defaults, **values}


@pytest.fixture
def results() -> Results:
    """An empty sweep to be filled and written."""
    return Results()
