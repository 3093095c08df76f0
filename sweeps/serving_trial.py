"""One serving cell: requests, load, ledger, proof and plausibility, as rows of the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ep_ray.config.schema import Config
from serving.engine_http import Counters
from serving.ledger import LedgerRow, difference, disagreement, reconcile
from serving.load.metrics import cell_metrics, lag_flag, plausibility
from serving.load.prompts import CallSpec, build_requests
from serving.load.records import CellRecord, Request, RequestRecord
from sweeps.outcome import Outcome
from sweeps.plan import ServingTrial

_REASONS_SHOWN = 3


def requests_of_cell(
    config: Config, trial: ServingTrial, spec: CallSpec, calibrate: bool
) -> list[Request]:
    """The cell's requests; the arm's first cell carries the calibration request too."""
    return build_requests(
        spec,
        seed=config.seed,
        trial_id=trial.trial_id,
        measured=trial.requests,
        warmups=config.load.warmups,
        calibration=config.load.calibration if calibrate else 0,
    )


def outcome_of_cell(
    record: CellRecord, trial: ServingTrial, ledger: Sequence[LedgerRow]
) -> Outcome:
    """Rows of a cell, and whether it may be believed."""
    metrics = cell_metrics(record.requests, record.wall_ns, trial.concurrency)
    doubts = plausibility(record.requests, trial.concurrency)
    problems = _problems(record, trial, ledger)
    return Outcome(
        status="failed" if problems else "ok",
        error="; ".join(problems) or None,
        rows={
            "requests": [_request_row(request) for request in record.requests],
            "ledger": [row.as_dict() for row in ledger],
            "cells": [
                {
                    "wall_ns": record.wall_ns,
                    "in_flight_max": record.in_flight_max,
                    "client_lag_p99_ns": record.client_lag_p99_ns,
                    "client_lag_flag": lag_flag(record.client_lag_p99_ns, metrics.itl_p50_ms),
                    "plausibility": doubts,
                }
            ],
        },
    )


def ledger_of_cell(
    record: CellRecord,
    endpoints: Sequence[str],
    router: tuple[Any, Any],
    engines: tuple[Mapping[str, Counters] | None, Mapping[str, Counters] | None],
) -> list[LedgerRow]:
    """Client, router and engine counts of a cell; `router` and `engines` are (before, after)."""
    before, after = router
    grown = None
    if engines[0] is not None and engines[1] is not None:
        grown = {
            name: {
                "complete": now.complete - engines[0][name].complete,
                "aborted": now.aborted - engines[0][name].aborted,
            }
            for name, now in engines[1].items()
        }
    routed = None if after is None else difference(after, before or {})
    return reconcile(record.requests, endpoints, routed, grown)


def _problems(record: CellRecord, trial: ServingTrial, ledger: Sequence[LedgerRow]) -> list[str]:
    problems: list[str] = []
    bad = [request for request in record.requests if request.state != "complete"]
    if bad:
        reasons = sorted({request.reason for request in bad})
        shown = "; ".join(reasons[:_REASONS_SHOWN])
        problems.append(f"{len(bad)} of {len(record.requests)} requests not complete: {shown}")
    expected = min(trial.concurrency, trial.requests)
    if record.in_flight_max < expected:
        problems.append(f"{record.in_flight_max} requests in flight at most, asked {expected}")
    disagreeing = disagreement(ledger)
    if disagreeing:
        problems.append(f"the ledger disagrees: {disagreeing}")
    return problems


def _request_row(request: RequestRecord) -> dict[str, Any]:
    row = asdict(request)
    row["chunk_ns"], row["chunk_tokens"] = list(request.chunk_ns), list(request.chunk_tokens)
    return row
