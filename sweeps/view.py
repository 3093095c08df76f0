"""A sweep as reports read it: its tables, and its trials in cells by arms, computed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pyarrow as pa

from serving.load.metrics import CellMetrics, cell_metrics
from serving.load.records import RequestRecord
from sweeps.a2a_metrics import A2aMetrics, a2a_metrics
from sweeps.outcome import UNAVAILABLE
from sweeps.results import Grid, Trial, arrange, by_trial, trials


class ServingKey(NamedTuple):
    """Where a serving cell stands: its shape, and its concurrency or an open loop's rate."""

    shape: str
    concurrency: int
    rate_per_s: float | None = None

    @property
    def load(self) -> str:
        """`c16`, or `2.5 req/s`."""
        if self.rate_per_s is not None:
            return f"{self.rate_per_s:g} req/s"
        return f"c{self.concurrency}"


ServingGrid = Grid[ServingKey, CellMetrics]
A2aKey = tuple[str, int]  # everything else that distinguishes two cells, in words; EP size
A2aGrid = Grid[A2aKey, A2aMetrics]

NULL = "null engines"
"""What stands behind the shape of cells that no model served."""

_REQUEST_COLUMNS = [f.name for f in fields(RequestRecord)]


@dataclass(frozen=True)
class View:
    """What a report is made from. `trials` are in the order in which they started.

    Trials of backends that cannot run there are kept apart in `unavailable`: nothing was tried.
    """

    tables: Mapping[str, pa.Table]
    trials: tuple[Trial, ...]
    unavailable: tuple[Trial, ...]
    serving: ServingGrid
    a2a: A2aGrid

    def of(self, measure: str) -> list[Trial]:
        """The trials that measured `a2a` or `serving`."""
        return [trial for trial in self.trials if trial.measure == measure]

    def place(self, trial: Trial) -> tuple[str, str]:
        """Arm and cell of a trial, in words; with its repeat where cells were repeated."""
        repeated = any(other.repeat for other in self.trials)
        return trial.label, f"{trial.cell}, repeat {trial.repeat}" if repeated else trial.cell

    def rows(
        self, table: str, columns: tuple[str, ...] = ()
    ) -> Iterator[tuple[Trial, dict[str, Any]]]:
        """Rows of a table with their trials, in the order of the trials; all columns by default."""
        names = columns or tuple(self.tables[table].schema.names[2:])
        grouped = by_trial(self.tables[table], names)
        for trial in self.trials:
            for row in grouped.get(trial.trial_id, []):
                yield trial, row


def view(tables: Mapping[str, pa.Table]) -> View:
    """Arrange a sweep's tables (last attempts only, as `load` returns them)."""
    everything = trials(tables)
    found = [t for t in everything if t.status != UNAVAILABLE]
    serving = [t for t in found if t.measure == "serving"]
    a2a = [t for t in found if t.measure == "a2a"]
    return View(
        tables,
        tuple(found),
        tuple(t for t in everything if t.status == UNAVAILABLE),
        arrange(serving, serving_key, _serving_metrics(tables, serving)),
        arrange(a2a, a2a_key, a2a_metrics(tables)),
    )


def serving_key(trial: Trial) -> ServingKey:
    """Where a serving trial stands in the tables."""
    return ServingKey(_shape(trial), trial.concurrency or 0, trial.rate_per_s)


def _shape(trial: Trial) -> str:
    """The shape in words: one kind of prompts never stands beside another (a text's tokens are not
    exact, and a prefix cache may help with some), nor cells with cancelled requests beside others,
    nor engines without a model beside models."""
    words = [trial.shape or trial.cell]
    if trial.arm_kind == "null_engine":
        words.append(NULL)
    if trial.prompts not in (None, "token_ids"):
        words.append(trial.prompts)
    if trial.cancel_share:
        share = f"{100 * trial.cancel_share:g} %"
        words.append(f"with {share} cancelled after {trial.cancel_after_tokens}")
    return " ".join(words)


def a2a_key(trial: Trial) -> A2aKey:
    """Where an all-to-all trial stands in the tables."""
    dtypes = f"{trial.dispatch_dtype}/{trial.combine_dtype}"
    load = (
        f"{trial.phase}, {trial.tokens} tokens, {trial.routing} routing, H {trial.hidden}, "
        f"{trial.experts} experts, top-{trial.topk}, {dtypes}"
    )
    load = ", ".join([load, *trial.unusual])
    return load, trial.ep or 0


def request_record(row: Mapping[str, Any]) -> RequestRecord:
    """The record behind a row of the `requests` table; a null list is an empty one."""
    values = {name: row[name] for name in _REQUEST_COLUMNS}
    lists = {name: tuple(row[name] or ()) for name in ("chunk_ns", "chunk_tokens")}
    return RequestRecord(**{**values, **lists})


def _serving_metrics(tables: Mapping[str, pa.Table], found: list[Trial]) -> dict[str, CellMetrics]:
    """Metrics of every serving trial that has requests and a cell row, by trial id."""
    cells = by_trial(tables["cells"], ["wall_ns"])
    requests = by_trial(tables["requests"], _REQUEST_COLUMNS)
    return {
        trial.trial_id: cell_metrics(
            [request_record(row) for row in requests[trial.trial_id]],
            cells[trial.trial_id][0]["wall_ns"],
            trial.concurrency or 0,
        )
        for trial in found
        if trial.trial_id in cells and trial.trial_id in requests
    }
