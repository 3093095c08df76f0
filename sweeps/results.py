"""Trials of a sweep arranged for comparison: cells by arms, with the metrics of each repeat."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import pyarrow as pa

from sweeps.stats import median

M = TypeVar("M")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Trial:
    """One row of the `trials` table: the columns that a report reads."""

    trial_id: str
    attempt: int
    experiment: str | None
    measure: str
    arm: str
    cell: str
    repeat: int
    status: str
    error: str | None
    config_hash: str | None
    config_json: str | None
    started_unix_ns: int | None
    backend: str | None
    device: str | None
    shared_gpu: bool | None
    transport_asked: str | None
    transport_seen: str | None
    transport_status: str | None
    phase: str | None
    ep: int | None
    tokens: int | None
    hidden: int | None
    experts: int | None
    topk: int | None
    routing: str | None
    dispatch_dtype: str | None
    combine_dtype: str | None
    shape: str | None
    concurrency: int | None
    requests: int | None
    tp: int | None
    dp: int | None
    versions_json: str | None
    hardware_json: str | None
    env_json: str | None
    launch: str | None
    compat: str | None
    masked_share: float | None
    tokens_per_rank: str | None
    local_tp: int | None
    arrival: str | None
    rate_per_s: float | None
    prompts: str | None
    prompts_digest: str | None
    restarted_for: str | None
    router: str | None
    cancel_share: float | None
    cancel_after_tokens: int | None
    router_processes: int | None
    moe_layers: int | None
    arm_kind: str | None
    tags: str | None
    clients: int | None

    @property
    def label(self) -> str:
        """The arm as a column is headed: its name, and its transport where one was asked for."""
        transport = self.transport_asked
        if transport in (None, "", "auto") or self.arm.endswith(f"_{transport}"):
            return self.arm
        return f"{self.arm} over {transport}"

    @property
    def unusual(self) -> list[str]:
        """How an all-to-all cell differs from the usual: other cells never stand beside it."""
        words = [
            f"{self.masked_share:.0%} masked" if self.masked_share else "",
            f"{self.tokens_per_rank} tokens per rank" if self._uneven else "",
            f"each {self.local_tp} ranks share them" if (self.local_tp or 1) > 1 else "",
            "CUDA graph" if self.launch == "graph" else "",
            "ranks share a GPU" if self.shared_gpu else "",
            f"measured as {self.compat} does" if self.compat else "",
        ]
        return [word for word in words if word]

    @property
    def _uneven(self) -> bool:
        return self.tokens_per_rank not in (None, "uniform")


@dataclass(frozen=True)
class Outcome(Generic[M]):
    """What one arm did in one cell.

    Attributes:
        trials: Its trials, one for each repeat.
        metrics: By repeat; only trials that ended well are in it.
    """

    trials: tuple[Trial, ...]
    metrics: Mapping[int, M]

    def series(self, metric: str) -> dict[int, float]:
        """A metric by repeat, where it is defined."""
        values = {repeat: getattr(m, metric) for repeat, m in self.metrics.items()}
        return {repeat: value for repeat, value in values.items() if value is not None}

    def median(self, metric: str) -> float | None:
        """Median of a metric over repeats; the value itself with one."""
        return median(list(self.series(metric).values()))

    @property
    def status(self) -> str:
        """Empty if any repeat gave metrics, else how the last trial ended."""
        return "" if self.metrics else self.trials[-1].status


Grid = dict[Key, dict[str, Outcome[M]]]


def trials(tables: Mapping[str, pa.Table]) -> list[Trial]:
    """The trials of a sweep in the order in which they started."""
    names = [f.name for f in fields(Trial)]
    found = [Trial(**row) for row in tables["trials"].select(names).to_pylist()]
    return sorted(found, key=lambda t: t.started_unix_ns or 0)


def by_trial(table: pa.Table, columns: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Rows of a table, with these columns, by trial."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in table.select(["trial_id", *columns]).to_pylist():
        grouped.setdefault(row.pop("trial_id"), []).append(row)
    return grouped


def arrange(
    found: Sequence[Trial], key: Callable[[Trial], Key], metrics: Mapping[str, M]
) -> Grid[Key, M]:
    """Trials by cell and arm label. Failed trials have no metrics, whatever rows they left."""
    grouped: dict[Key, dict[str, dict[int, Trial]]] = {}
    for trial in found:
        grouped.setdefault(key(trial), {}).setdefault(trial.label, {})[trial.repeat] = trial
    return {
        cell: {label: _outcome(repeats, metrics) for label, repeats in arms.items()}
        for cell, arms in grouped.items()
    }


def _outcome(repeats: Mapping[int, Trial], metrics: Mapping[str, M]) -> Outcome[M]:
    good = {
        repeat: metrics[trial.trial_id]
        for repeat, trial in sorted(repeats.items())
        if trial.status == "ok" and trial.trial_id in metrics
    }
    return Outcome(tuple(repeats[r] for r in sorted(repeats)), good)


def doubles(found: Sequence[Trial], key: Callable[[Trial], Hashable]) -> list[tuple[Trial, Trial]]:
    """Pairs of trials that claim the same cell, arm and repeat; `arrange` keeps the later one."""
    seen: dict[Hashable, Trial] = {}
    pairs = []
    for trial in found:
        place = (key(trial), trial.label, trial.repeat)
        if place in seen:
            pairs.append((seen[place], trial))
        seen[place] = trial
    return pairs


def labels(found: Sequence[Trial]) -> list[str]:
    """Arms in the order of their first trial: an experiment's own arm is planned first."""
    return list(dict.fromkeys(t.label for t in found))
