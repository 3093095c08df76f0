"""From the load client's record of a serving cell to rows of the tables, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from serving.ledger import LedgerRow, difference, disagreement, reconcile
from serving.load.metrics import CellMetrics, cell_metrics, lag_flag, plausibility
from serving.load.records import CellRecord, RequestRecord
from sweeps.host import Counts
from sweeps.outcome import Outcome
from sweeps.trial import ServingTrial

_REASONS_SHOWN = 3


def outcome_of_cell(
    record: CellRecord, trial: ServingTrial, ledger: Sequence[LedgerRow]
) -> Outcome:
    """Rows of a cell, and whether it may be believed."""
    metrics = cell_metrics(record.requests, record.wall_ns, trial.concurrency)
    problems = _problems(record, trial, ledger)
    return Outcome(
        status="failed" if problems else "ok",
        error="; ".join(problems) or None,
        headline=_headline(metrics),
        rows={
            "requests": [_request_row(request) for request in record.requests],
            "ledger": [row.as_dict() for row in ledger],
            "cells": [
                {
                    "wall_ns": record.wall_ns,
                    "in_flight_max": record.in_flight_max,
                    "client_lag_p99_ns": record.client_lag_p99_ns,
                    "client_lag_flag": lag_flag(record.client_lag_p99_ns, metrics.itl_p50_ms),
                    "plausibility": plausibility(record.requests, trial.concurrency),
                }
            ],
        },
    )


def ledger_of_cell(
    record: CellRecord, endpoints: Sequence[str], before: Counts, after: Counts
) -> list[LedgerRow]:
    """Client, router and engine counts of a cell, reconciled."""
    routed = None if after.router is None else difference(after.router, before.router or {})
    grown = None
    if before.engines is not None and after.engines is not None:
        grown = {
            name: {
                "complete": now.complete - before.engines[name].complete,
                "aborted": now.aborted - before.engines[name].aborted,
            }
            for name, now in after.engines.items()
        }
    return reconcile(record.requests, endpoints, routed, grown)


def _headline(metrics: CellMetrics) -> dict[str, float]:
    figures = {
        "ttft_p50_ms": metrics.ttft_p50_ms,
        "itl_p50_ms": metrics.itl_p50_ms,
        "output_tok_per_s": metrics.output_tokens_per_s,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _problems(record: CellRecord, trial: ServingTrial, ledger: Sequence[LedgerRow]) -> list[str]:
    problems: list[str] = []
    bad = bad_requests(record)
    if bad:
        shown = "; ".join(sorted({request.reason for request in bad})[:_REASONS_SHOWN])
        problems.append(f"{len(bad)} of {len(record.requests)} requests not complete: {shown}")
    expected = min(trial.concurrency, trial.requests)
    if record.in_flight_max < expected:
        problems.append(f"{record.in_flight_max} requests in flight at most, asked {expected}")
    disagreeing = disagreement(ledger)
    if disagreeing:
        problems.append(f"the ledger disagrees: {disagreeing}")
    return problems


def bad_requests(record: CellRecord) -> list[RequestRecord]:
    """Requests that are neither complete nor cancelled as the load asks."""
    return [r for r in record.requests if r.state != "complete" and not r.cancelled]


def _request_row(request: RequestRecord) -> dict[str, Any]:
    row = asdict(request)
    row["chunk_ns"], row["chunk_tokens"] = list(request.chunk_ns), list(request.chunk_tokens)
    return row
