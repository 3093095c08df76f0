"""What went wrong: trials that did not end well, and requests that did not complete."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from serving.load.records import is_cancelled
from sweeps.results import Trial
from sweeps.tablefmt import Block, Section, Verbatim, text_table
from sweeps.view import View

_SHORT = 110  # characters of a reason: two lines beside its arm and cells
_MOST_CELLS = 2
_ARM_DOWN = "the arm is down: "  # before the reason of the cell that brought it down


@dataclass(frozen=True)
class _Failure:
    """Trials of one arm that ended alike for the same reason."""

    arm: str
    status: str
    reason: str
    cells: tuple[str, ...]

    def named_cells(self, most: int | None = None) -> str:
        shown = self.cells[:most]
        more = len(self.cells) - len(shown)
        return "; ".join(shown) + (f"; and {more} more" if more else "")


def bad_trials(view: View) -> list[Trial]:
    """Trials that did not end well."""
    return [trial for trial in view.trials if trial.status != "ok"]


def sections(view: View) -> list[Section]:
    """Failures with their whole reasons; nothing where there are none."""
    return [*_trials(view), *_requests(view)]


def brief(view: View) -> list[Section]:
    """Failures with one line for each reason."""
    return [*_trials_briefly(view), *_requests_briefly(view)]


def unavailable(view: View) -> list[Section]:
    """Backends that could not run there, with every reason; nothing where all could."""
    reasons = dict.fromkeys((t.label, t.error or "no reason recorded") for t in view.unavailable)
    if not reasons:
        return []
    rows = [(arm, reason) for arm, why in reasons for reason in why.splitlines()]
    return [Section("Backends that cannot run there", (text_table("", ("arm", "reason"), rows),))]


def _failures(view: View) -> list[_Failure]:
    cells: dict[tuple[str, str, str], list[str]] = {}
    for trial in bad_trials(view):
        arm, cell = view.place(trial)
        why = (trial.error or "no reason recorded").removeprefix(_ARM_DOWN)
        cells.setdefault((arm, trial.status, why), []).append(cell)
    return [_Failure(*key, tuple(found)) for key, found in cells.items()]


def _trials(view: View) -> list[Section]:
    found = _failures(view)
    if not found:
        return []
    count = f"{len(bad_trials(view))} of {len(view.trials)} trials did not end well"
    blocks: list[Block] = [f"{count} and have no figures."]
    blocks += [
        Verbatim(f"{f.arm}: {f.status} in {f.named_cells()}", _one_reason_a_line(f.reason))
        for f in found
    ]
    return [Section("Failed trials", tuple(blocks))]


def _trials_briefly(view: View) -> list[Section]:
    rows = [
        (f.arm, f.named_cells(_MOST_CELLS), f.status, _shortened(f.reason)) for f in _failures(view)
    ]
    columns = ("arm", "cells", "status", "reason")
    return [Section("Failed trials", (text_table("", columns, rows),))] if rows else []


def _one_reason_a_line(text: str) -> str:
    """Reasons are joined by semicolons when they are recorded; a log stays as it is."""
    return text if "\n" in text else text.replace("; ", ";\n")


def _shortened(text: str) -> str:
    """The first line, cut where it is too long; three dots where anything is left out."""
    first, *rest = text.strip().splitlines() or [""]
    if len(first) > _SHORT:
        return first[:_SHORT].rstrip() + "..."
    return first + (" ..." if rest else "")


def failed_requests(view: View) -> Counter[tuple[str, ...]]:
    """Requests that failed or were aborted unasked, by (arm, cell, role, state, reason)."""
    counts: Counter[tuple[str, ...]] = Counter()
    for trial, row in view.rows("requests", ("role", "state", "reason")):
        if row["state"] != "complete" and not is_cancelled(row["state"], row["reason"]):
            why = row["reason"] or "no reason recorded"
            counts[(*view.place(trial), row["role"], row["state"], why)] += 1
    return counts


def _requests(view: View) -> list[Section]:
    counts = failed_requests(view)
    if not counts:
        return []
    columns = ("arm", "cell", "role", "state", "reason", "requests")
    table = text_table("", columns, [(*key, count) for key, count in counts.items()])
    return [Section("Failed requests", (table,))]


def _requests_briefly(view: View) -> list[Section]:
    counts: Counter[tuple[str, ...]] = Counter()
    for (arm, _, _, state, why), count in failed_requests(view).items():
        counts[arm, state, _shortened(why)] += count
    if not counts:
        return []
    rows = [(arm, state, count, why) for (arm, state, why), count in counts.most_common()]
    table = text_table("", ("arm", "state", "requests", "reason"), rows)
    return [Section("Failed requests", (table,))]
