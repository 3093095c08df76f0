"""How evenly the ranks of an arm were busy: requests running on each, idle shares and skew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.running import INTERVAL_S
from sweeps.results import Trial
from sweeps.tablefmt import Section, text_table
from sweeps.view import View

Row = dict[str, Any]

_TEXT = (
    "Each rank's own count of the requests in its batch (`vllm:num_requests_running`) is sampled "
    f"every {INTERVAL_S * 1000:.0f} ms, all ranks at once, from the first measured request sent to "
    "the last one ended. Running: mean over the readings of each rank, in rank order. Idle: of the "
    "readings in which any rank ran or held a request, those in which this rank ran none; ranks "
    "that share an expert collective then run dummy batches in step with the others. Skew: largest "
    "batch over the mean batch of the ranks, both summed over the readings; 1 is even, and the "
    "number of ranks is all requests on one. A rank that did not answer in time has fewer readings."
)
_COLUMNS = ("arm", "cell", "ranks", "readings", "running per rank", "most", "waiting per rank",
            "idle per rank", "skew")  # fmt: skip


def sections(view: View) -> list[Section]:
    """A line for each cell of an arm with several ranks; nothing where none was read."""
    of_trial: dict[str, tuple[Trial, list[Row]]] = {}
    for trial, row in view.rows("lockstep"):
        of_trial.setdefault(trial.trial_id, (trial, []))[1].append(row)
    body = [_line(view, *found) for found in of_trial.values() if len(found[1]) > 1]
    return [Section("Lockstep", (_TEXT, text_table("", _COLUMNS, body)))] if body else []


def _line(view: View, trial: Trial, rows: Sequence[Row]) -> tuple[object, ...]:
    readings = sorted({row["readings"] for row in rows})
    return (
        *view.place(trial),
        len(rows),
        "-".join(str(n) for n in dict.fromkeys((readings[0], readings[-1]))),
        _each([_number(row["running_mean"]) for row in rows]),
        max((row["running_max"] for row in rows if row["running_max"] is not None), default=None),
        _each([_number(row["waiting_mean"]) for row in rows]),
        _each([_share(row) for row in rows]),
        _number(rows[0]["skew"]),
    )


def _each(words: Sequence[str]) -> str:
    """`2.00 / 1.95`; blank where no rank has a figure."""
    return " / ".join(words) if any(word != "-" for word in words) else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(row: Row) -> str:
    return f"{row['idle'] / row['at_work']:.0%}" if row["at_work"] else "-"
