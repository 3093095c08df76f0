"""The report of a sweep, built from its Arrow tables; and the report of the published results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sweeps import (
    report_a2a,
    report_attribution,
    report_benefits,
    report_conditions,
    report_definitions,
    report_evidence,
    report_failures,
    report_flags,
    report_lockstep,
    report_published,
    report_serving,
    report_standing,
    report_unmeasured,
    report_verdicts,
)
from sweeps.read import load
from sweeps.report_compare import COMPARISONS
from sweeps.tablefmt import Section
from sweeps.view import View, view

PUBLISHED_NAMES = tuple(COMPARISONS)


@dataclass(frozen=True)
class Report:
    """A report at two depths: what a person reads first, and everything."""

    title: str
    brief: list[Section]
    full: list[Section]


def of_published() -> Report:
    """The report of the published results, which has one depth."""
    sections = report_published.sections()
    return Report("Published results", sections, sections)


def of_results(results_dir: str | Path, published: str | None = None) -> Report:
    """The report of a sweep, beside a published run where one is named.

    Raises:
        sweeps.read.ResultsError: The folder cannot be read as results.
    """
    swept = view(load(results_dir))
    return Report(_title(swept, results_dir), brief(swept, published), build(swept, published))


def footer(results_dir: str | Path, written: Path) -> str:
    """Where the results are, and how to see more of them."""
    return (
        f"\nResults  {results_dir}\nReport   {written} (everything)\n"
        f"Again    python -m ep_ray.report {results_dir} [--full]"
    )


def build(swept: View, published: str | None = None) -> list[Section]:
    """Everything about a sweep."""
    if not swept.trials:
        return [*_nothing(), *report_failures.unavailable(swept)]
    return [
        Section("", (_summary(swept), report_conditions.sentence(swept))),
        *report_a2a.sections(swept),
        *report_serving.sections(swept),
        *report_verdicts.sections(swept),
        *report_benefits.sections(swept),
        *report_attribution.sections(swept),
        *_beside(swept, published),
        *report_failures.unavailable(swept),
        *report_failures.sections(swept),
        *report_flags.sections(swept),
        *report_evidence.sections(swept),
        *report_lockstep.sections(swept),
        *report_standing.sections(swept),
        *report_unmeasured.sections(swept),
        *report_definitions.sections(swept),
        *report_conditions.sections(swept),
    ]


def brief(swept: View, published: str | None = None) -> list[Section]:
    """What fits a screen or two: headlines, ratios, evidence and whatever went wrong."""
    if not swept.trials:
        return [*_nothing(), *report_failures.unavailable(swept)]
    return [
        Section("", (f"{_summary(swept)}\n{report_conditions.sentence(swept)}",)),
        *report_a2a.brief(swept),
        *report_serving.brief(swept),
        *report_benefits.sections(swept),
        *report_attribution.sections(swept),
        *_beside(swept, published),
        *report_evidence.brief(swept),
        *report_standing.brief(swept),
        *report_failures.unavailable(swept),
        *report_failures.brief(swept),
        *report_flags.brief(swept),
        *report_unmeasured.brief(swept),
    ]


def _nothing() -> list[Section]:
    return [Section("", ("No trial has ended yet.",))]


def _beside(swept: View, published: str | None) -> list[Section]:
    return [COMPARISONS[published](swept)] if published else []


def _title(swept: View, results_dir: str | Path) -> str:
    names = dict.fromkeys(t.experiment or "" for t in swept.trials)
    return f"{', '.join(filter(None, names)) or 'Sweep'} ({Path(results_dir).name})"


def _summary(swept: View) -> str:
    """Trials, arms, and what went wrong in one line."""
    arms = ", ".join(dict.fromkeys(t.label for t in swept.trials))
    bad = len(report_failures.bad_trials(swept))
    lost = sum(report_failures.failed_requests(swept).values())
    flagged = len({(flag.arm, flag.cell) for flag in report_flags.flags(swept)})
    ended = f"{bad} FAILED" if bad else "all ended well"
    requests = f"{lost} requests FAILED" if lost else "no request failed"
    served = f", {requests}" if swept.tables["requests"].num_rows else ""
    doubts = f"{flagged} trials flagged" if flagged else "no flags"
    return f"{len(swept.trials)} trials of {arms}: {ended}{served}, {doubts}."
