"""The report of a sweep, built from its Arrow tables; and the report of the published results."""

from __future__ import annotations

from pathlib import Path

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
from sweeps.tablefmt import Section
from sweeps.view import View, view

PUBLISHED_NAMES = tuple(COMPARISONS)


def of_published() -> tuple[str, list[Section]]:
    """Title and sections of the report of the published results."""
    return "Published results", report_published.sections()


def of_results(results_dir: str | Path, published: str | None = None) -> tuple[str, list[Section]]:
    """Title and sections of the report of a sweep, beside a published run where one is named.

    Raises:
        sweeps.read.ResultsError: The folder cannot be read as results.
    """
    swept = view(load(results_dir))
    return _title(swept, results_dir), build(swept, published)


def build(swept: View, published: str | None = None) -> list[Section]:
    """Sections of the report of a sweep."""
    if not swept.trials:
        return [Section("Trials", ("No trial has ended yet.",))]
    beside = [COMPARISONS[published](swept)] if published else []
    return [
        Section("Trials", (_summary(swept),)),
        *report_serving.sections(swept),
        *report_a2a.sections(swept),
        *beside,
        *report_failures.sections(swept),
        *report_evidence.sections(swept),
        *report_conditions.sections(swept),
    ]


def _title(swept: View, results_dir: str | Path) -> str:
    names = dict.fromkeys(t.experiment or "" for t in swept.trials)
    return f"{', '.join(filter(None, names)) or 'Sweep'} ({Path(results_dir).name})"


def _summary(swept: View) -> str:
    found = swept.trials
    arms = ", ".join(dict.fromkeys(t.label for t in found))
    bad = sum(t.status != "ok" for t in found)
    ended = "all ended well" if not bad else f"{bad} FAILED (see Failed trials)"
    return f"{len(found)} trials of {arms}: {ended}."
