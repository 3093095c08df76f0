"""Metrics of one all-to-all trial from its raw samples and its operations' facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ep_ray.a2a.statistic import statistic_in_words
from ep_ray.a2a.stats import Samples, pooled, rank_medians_ns
from sweeps.results import by_trial
from sweeps.stats import median

_US = 1e-3
_BYTES_PER_US_TO_GB_PER_S = 1e-3
OPS = (
    *("dispatch", "combine", "pair", "dispatch_send", "dispatch_recv"),
    *("combine_send", "combine_recv", "pair_overlapped", "work"),
)


@dataclass(frozen=True)
class OpMetrics:
    """One operation of a trial: times in µs, and what was recorded about it.

    `headline_us` is None with a reason in `problem` when the samples do not form whole iterations.
    """

    headline_us: float | None
    p50_us: float | None
    p95_us: float | None
    p99_us: float | None
    rank_p50_min_us: float | None
    rank_p50_max_us: float | None
    cold_us: float | None
    iterations: int
    problem: str
    facts: Mapping[str, Any]

    @property
    def bound_us(self) -> float | None:
        """Lower bound; None where nothing crosses a link."""
        bound: float | None = self.facts.get("bound_ns")
        return _scaled(bound)

    @property
    def ratio_to_bound(self) -> float | None:
        """Headline over the lower bound."""
        bound = self.bound_us
        return self.headline_us / bound if self.headline_us and bound else None

    @property
    def wire_gb_per_s(self) -> float | None:
        """Largest bytes of a rank, out or in, over the headline; own share excluded."""
        sizes = [self.facts.get("wire_bytes_out_max"), self.facts.get("wire_bytes_in_max")]
        known = [size for size in sizes if size is not None]
        if not known or not self.headline_us:
            return None
        return float(max(known)) / self.headline_us * _BYTES_PER_US_TO_GB_PER_S

    def busbw_gb_per_s(self, ranks: int) -> float | None:
        """What nccl-tests calls busbw: mean bytes that a rank sends to others / headline."""
        total = self.facts.get("wire_bytes_total")
        if not total or not self.headline_us:
            return None
        return float(total) / ranks / self.headline_us * _BYTES_PER_US_TO_GB_PER_S


@dataclass(frozen=True)
class A2aMetrics:
    """One trial: its operations by name, and the headline of each as an attribute."""

    ops: Mapping[str, OpMetrics]
    floor_us: float | None

    @property
    def dispatch_us(self) -> float | None:
        """Headline of dispatch."""
        return self._headline("dispatch")

    @property
    def combine_us(self) -> float | None:
        """Headline of combine."""
        return self._headline("combine")

    @property
    def pair_us(self) -> float | None:
        """Headline of dispatch and combine together."""
        return self._headline("pair")

    def _headline(self, op: str) -> float | None:
        return self.ops[op].headline_us if op in self.ops else None


def a2a_metrics(tables: Mapping[str, pa.Table]) -> dict[str, A2aMetrics]:
    """Metrics of every trial that has samples, by trial id."""
    facts = by_trial(tables["operations"], tables["operations"].schema.names[2:])
    rows = tables["samples"]
    columns = [rows[f.name].to_numpy(zero_copy_only=False) for f in fields(Samples)]
    found = {}
    for trial_id, at in _rows_of_trials(rows["trial_id"]):
        samples = Samples(*(column[at] for column in columns))
        by_op = {row["op"]: row for row in facts.get(trial_id, [])}
        found[trial_id] = _trial_metrics(samples, by_op)
    return found


def _rows_of_trials(trial_id: pa.ChunkedArray) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Row numbers of each trial, in one sort instead of one pass for each trial."""
    if len(trial_id) == 0:
        return
    encoded = trial_id.combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes, minlength=len(encoded.dictionary)))
    yield from zip(encoded.dictionary.to_pylist(), np.split(order, ends[:-1]), strict=True)


def _trial_metrics(samples: Samples, facts: Mapping[str, Mapping[str, Any]]) -> A2aMetrics:
    measured = set(samples.op[samples.role == "measured"])
    floor = samples.duration_ns[samples.role == "floor"]
    ops = {op: _op_metrics(samples, op, facts.get(op, {})) for op in OPS if op in measured}
    return A2aMetrics(ops, _scaled(median(floor)))


def _op_metrics(samples: Samples, op: str, facts: Mapping[str, Any]) -> OpMetrics:
    top, problem = _headline(samples, op, facts)
    pool, per_rank = pooled(samples, op), rank_medians_ns(samples, op).values()
    cold = samples.of(op, "cold").duration_ns
    return OpMetrics(
        headline_us=_scaled(top),
        p50_us=_scaled(pool.p50_ns),
        p95_us=_scaled(pool.p95_ns),
        p99_us=_scaled(pool.p99_ns),
        rank_p50_min_us=_scaled(min(per_rank)),
        rank_p50_max_us=_scaled(max(per_rank)),
        cold_us=_scaled(float(cold.max()) if len(cold) else None),
        iterations=len(np.unique(samples.of(op).iteration)),
        problem=problem,
        facts=facts,
    )


def _headline(samples: Samples, op: str, facts: Mapping[str, Any]) -> tuple[float | None, str]:
    try:
        return statistic_in_words(facts.get("statistic")).of(samples, op), ""
    except ValueError as error:
        return None, str(error)


def _scaled(ns: float | None) -> float | None:
    return None if ns is None else ns * _US
