"""Metrics of one all-to-all trial from its raw samples and its operations' facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sweeps.results import by_trial
from sweeps.stats import headline, median, percentile

_US = 1e-3
_BYTES_PER_US_TO_GB_PER_S = 1e-3
OPS = ("dispatch", "combine", "pair")
_SAMPLE_COLUMNS = ("op", "role", "rank", "iteration", "duration_ns")


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
    samples = tables["samples"]
    arrays = {name: samples[name].to_numpy(zero_copy_only=False) for name in _SAMPLE_COLUMNS}
    found = {}
    for trial_id, rows in _rows_of_trials(samples["trial_id"]):
        of_trial = {name: values[rows] for name, values in arrays.items()}
        by_op = {row["op"]: row for row in facts.get(trial_id, [])}
        found[trial_id] = _trial_metrics(of_trial, by_op)
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


def _trial_metrics(
    samples: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Mapping[str, Any]]
) -> A2aMetrics:
    floor = samples["duration_ns"][samples["role"] == "floor"]
    present = [op for op in OPS if ((samples["op"] == op) & (samples["role"] == "measured")).any()]
    ops = {op: _op_metrics(samples, op, facts.get(op, {})) for op in present}
    return A2aMetrics(ops, _scaled(median(floor)))


def _op_metrics(
    samples: Mapping[str, npt.NDArray[Any]], op: str, facts: Mapping[str, Any]
) -> OpMetrics:
    of_op = samples["op"] == op
    mine = of_op & (samples["role"] == "measured")
    rank, iteration = samples["rank"][mine], samples["iteration"][mine]
    duration = samples["duration_ns"][mine]
    cold = samples["duration_ns"][of_op & (samples["role"] == "cold")]
    per_rank = [float(np.median(duration[rank == r])) for r in np.unique(rank)]
    top, problem = _headline(rank, iteration, duration)
    return OpMetrics(
        headline_us=_scaled(top),
        p50_us=_scaled(percentile(duration, 50)),
        p95_us=_scaled(percentile(duration, 95)),
        p99_us=_scaled(percentile(duration, 99)),
        rank_p50_min_us=_scaled(min(per_rank)),
        rank_p50_max_us=_scaled(max(per_rank)),
        cold_us=_scaled(float(cold.max()) if len(cold) else None),
        iterations=len(np.unique(iteration)),
        problem=problem,
        facts=facts,
    )


def _headline(
    rank: npt.NDArray[np.int64], iteration: npt.NDArray[np.int64], duration: npt.NDArray[np.int64]
) -> tuple[float | None, str]:
    try:
        return headline(rank, iteration, duration), ""
    except ValueError as error:
        return None, str(error)


def _scaled(ns: float | None) -> float | None:
    return None if ns is None else ns * _US
