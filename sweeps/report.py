"""The report of a sweep, built from its Arrow tables; and the report of the published results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from sweeps import (
    report_a2a,
    report_conditions,
    report_evidence,
    report_failures,
    report_published,
    report_serving,
)
from sweeps.read import load
from sweeps.report_compare import COMPARISONS
from sweeps.results import trials
from sweeps.tablefmt import Section

PUBLISHED_NAMES = tuple(COMPARISONS)


def of_published() -> tuple[str, list[Section]]:
    """Title and sections of the report of the published results."""
    return "Published results", report_published.sections()


def of_results(results_dir: str | Path, published: str | None = None) -> tuple[str, list[Section]]:
    """Title and sections of the report of a sweep, beside a published run where one is named.

    Raises:
        sweeps.read.ResultsError: The folder cannot be read as results.
    """
    tables = load(results_dir)
    return _title(tables, results_dir), build(tables, published)


def build(tables: Mapping[str, pa.Table], published: str | None = None) -> list[Section]:
    """Sections of the report of a sweep's tables (last attempts only, as `load` returns them)."""
    if not trials(tables):
        return [Section("Trials", ("No trial has ended yet.",))]
    beside = [COMPARISONS[published](tables)] if published else []
    return [
        Section("Trials", (_summary(tables),)),
        *report_serving.sections(tables),
        *report_a2a.sections(tables),
        *beside,
        *report_failures.sections(tables),
        *report_evidence.sections(tables),
        *report_conditions.sections(tables),
    ]


def _title(tables: Mapping[str, pa.Table], results_dir: str | Path) -> str:
    names = dict.fromkeys(t.experiment or "" for t in trials(tables))
    return f"{', '.join(filter(None, names)) or 'Sweep'} ({Path(results_dir).name})"


def _summary(tables: Mapping[str, pa.Table]) -> str:
    found = trials(tables)
    arms = ", ".join(dict.fromkeys(t.label for t in found))
    bad = sum(t.status != "ok" for t in found)
    ended = "all ended well" if not bad else f"{bad} FAILED (see Failed trials)"
    return f"{len(found)} trials of {arms}: {ended}."
