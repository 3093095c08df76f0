"""The limitations of a serving sweep, listed from what its tables do not hold."""

from __future__ import annotations

from dataclasses import replace

from sweeps.tablefmt import Section, text_table
from sweeps.unmeasured import Unmeasured, setting
from sweeps.unmeasured_arms import between_arms
from sweeps.view import View

_TITLE = "Limitations"
_NULL = "null_engine"


def sections(view: View) -> list[Section]:
    """Each limitation with the fact that it rests on; nothing when the sweep did not serve."""
    found = _limitations(view)
    if not found:
        return []
    text = "What this sweep does not show, from what was not measured in it."
    rows = [(entry.what, entry.fact) for entry in found]
    return [Section(_TITLE, (text, text_table("", ("not shown", "because"), rows)))]


def brief(view: View) -> list[Section]:
    """The limitations in one paragraph, without their facts."""
    found = _limitations(view)
    if not found:
        return []
    listed = "; ".join(entry.what for entry in found)
    text = f"Not shown here: {listed}. The full report says why of each."
    return [Section(_TITLE, (text,))]


def _limitations(view: View) -> list[Unmeasured]:
    served = _with_models(view)
    if not served.of("serving"):
        return []
    return [*setting(served), *between_arms(served)]


def _with_models(view: View) -> View:
    """Without null engines, which are the instrument's own test: nobody compares arms by them."""
    kept = tuple(trial for trial in view.trials if trial.arm_kind != _NULL)
    cells = {
        key: outcomes
        for key, outcomes in view.serving.items()
        if not any(t.arm_kind == _NULL for o in outcomes.values() for t in o.trials)
    }
    return replace(view, trials=kept, serving=cells)
