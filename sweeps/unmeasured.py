"""What a serving sweep did not measure of its setting, each with the fact that says so.

What its comparison of arms cannot tell apart is in `unmeasured_arms`. The limits of the published
tables are something else: `sweeps.published.limits`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serving.load.metrics import CellMetrics
from sweeps.arm_facts import config_of
from sweeps.report_serving import failed_requests, request_counts, sorted_cells
from sweeps.results import Outcome, Trial, labels
from sweeps.stats import REPEATS_NEEDED
from sweeps.view import View


@dataclass(frozen=True)
class Unmeasured:
    """Something that a sweep does not show, and the fact in its tables that it rests on."""

    what: str
    fact: str


def setting(view: View) -> Iterator[Unmeasured]:
    """Repeats, evidence, machines, models and what is missing, in the order of their weight."""
    found = view.of("serving")
    yield from _repeats(view)
    yield from _missing(view)
    yield from _transport(found)
    yield from _shared_gpu(found)
    yield from _client(view)
    yield from _clocks(view)
    yield from _machines(found)
    yield from _device(found)
    yield from _widths(found)
    yield from _models(found)
    yield from _collective(view)
    yield from _standing(view)


def _repeats(view: View) -> Iterator[Unmeasured]:
    runs = [len(o.metrics) for arms in view.serving.values() for o in arms.values() if o.metrics]
    if not runs or min(runs) >= REPEATS_NEEDED:
        return
    needed = f"a verdict takes {REPEATS_NEEDED} paired repeats"
    what = "whether differences are larger than the noise between runs"
    if max(runs) == 1:
        yield Unmeasured(f"{what} (no intervals)", f"every cell ran once; {needed}")
        return
    least, most = min(runs), max(runs)
    spread = f"{least} to {most} runs" if least < most else f"{most} runs"
    yield Unmeasured(what, f"{spread} of each arm and cell; {needed}")


def _missing(view: View) -> Iterator[Unmeasured]:
    """Cells that an arm failed in, wholly or in part, or that only other arms ran."""
    lost: dict[tuple[str, str], list[str]] = {}
    arms = labels(view.of("serving"))
    for key, outcomes in sorted_cells(view.serving):
        for arm in arms:
            for words in _lost(outcomes.get(arm)):
                lost.setdefault((arm, words), []).append(f"{key.shape} {key.load}")
    for (arm, words), cells in lost.items():
        yield Unmeasured(f"{arm} at {', '.join(cells)}", words)


def _lost(outcome: Outcome[CellMetrics] | None) -> list[str]:
    if outcome is None:
        return ["not run"]
    ran = len(outcome.trials)
    bad = Counter(trial.status for trial in outcome.trials if trial.status != "ok")
    words = [f"{status} in {n} of {ran} run{'s' if ran > 1 else ''}" for status, n in bad.items()]
    if failed := failed_requests(outcome):
        words.append(f"{failed} of {request_counts(outcome)[1]} requests failed")
    return words


def _transport(found: Sequence[Trial]) -> Iterator[Unmeasured]:
    for label, of in _by_arm(found):
        asked = of[0].transport_asked
        wrong = [trial for trial in of if trial.transport_status == "contradicted"]
        if wrong:
            seen = ", ".join(dict.fromkeys(str(trial.transport_seen) for trial in wrong))
            fact = f"{seen} was seen in {len(wrong)} of {len(of)} trials"
            yield Unmeasured(f"{label}: anything over {asked}", fact)
        unproved = sum(trial.transport_status == "unproved" for trial in of)
        if unproved:
            fact = f"unproved in {unproved} of {len(of)} trials"
            yield Unmeasured(f"{label}: that its traffic went over {asked}", fact)


def _shared_gpu(found: Sequence[Trial]) -> Iterator[Unmeasured]:
    for label, of in _by_arm(found):
        shared = sum(bool(trial.shared_gpu) for trial in of)
        if shared:
            fact = f"its ranks shared a GPU in {shared} of {len(of)} trials"
            yield Unmeasured(f"{label}: its speed (it shows function only)", fact)


def _client(view: View) -> Iterator[Unmeasured]:
    late: dict[str, list[float]] = {}
    for trial, row in view.rows("cells", ("client_lag_flag", "client_lag_p99_ns")):
        if row["client_lag_flag"]:
            late.setdefault(trial.label, []).append((row["client_lag_p99_ns"] or 0) / 1e6)
    trials = Counter(trial.label for trial in view.of("serving"))
    for label, lags in late.items():
        fact = f"flagged in {len(lags)} of {trials[label]} trials, p99 up to {max(lags):.2f} ms"
        yield Unmeasured(f"{label}: latencies free of the client's own lag", fact)


def _clocks(view: View) -> Iterator[Unmeasured]:
    if not any(view.rows("telemetry", ("name",))):
        yield Unmeasured("how steady the machine was", "no telemetry was recorded")
        return
    found = view.of("serving")
    kinds: Counter[str] = Counter()
    for trial in found:
        kinds.update(dict.fromkeys(tag.split(" on ")[0] for tag in _tags(trial)).keys())
    if kinds:
        fact = "; ".join(f"{kind} in {n} of {len(found)} trials" for kind, n in kinds.items())
        yield Unmeasured("speed at steady clocks", fact)


def _tags(trial: Trial) -> Iterator[str]:
    """Tags of a trial; of a changed clock without how far, which differs each time."""
    for tag in filter(None, (trial.tags or "").split("; ")):
        yield tag.split(":")[0] if tag.startswith("sm_clock_changed") else tag


def _machines(found: Sequence[Trial]) -> Iterator[Unmeasured]:
    hosts = [set(_hardware(trial).get("machines") or {}) for trial in found]
    if any(len(of) > 1 for of in hosts):
        return
    named = sorted(set().union(*hosts))
    fact = f"each trial ran on one machine ({', '.join(named)})" if named else "no machine recorded"
    yield Unmeasured("ranks on several machines", fact)


def _hardware(trial: Trial) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(trial.hardware_json or "{}")
    return found


def _device(found: Sequence[Trial]) -> Iterator[Unmeasured]:
    on_cpu = [trial for trial in found if config_of(trial).get("device") == "cpu"]
    if on_cpu:
        named = ", ".join(dict.fromkeys(str(trial.device) for trial in on_cpu))
        fact = f"{len(on_cpu)} of {len(found)} trials ran on {named}"
        yield Unmeasured("speed on GPUs", fact)


def _widths(found: Sequence[Trial]) -> Iterator[Unmeasured]:
    known = sorted({trial.dp for trial in found if trial.dp is not None})
    if known:
        ran = ", ".join(f"DP {width}" for width in known)
        yield Unmeasured("other widths of data parallelism", f"{ran} ran and no other")


def _models(found: Sequence[Trial]) -> Iterator[Unmeasured]:
    models = {
        str(model.get("name")): model
        for trial in found
        if (model := config_of(trial).get("model")) and model.get("experts") is not None
    }
    experts = ", ".join(f"{name} ({model['experts']})" for name, model in models.items())
    kinds = {bool(model["experts"]) for model in models.values()}
    if kinds == {True}:
        yield Unmeasured("dense models", f"experts of the models served: {experts}")
    elif kinds == {False}:
        yield Unmeasured("mixture-of-experts models", f"experts of the models served: {experts}")
    dummy = [name for name, model in models.items() if model.get("load_format") == "dummy"]
    if dummy:
        what = "the expert load of a trained model" if True in kinds else "a trained model"
        yield Unmeasured(what, f"load_format is dummy: {', '.join(dummy)} had random weights")


def _collective(view: View) -> Iterator[Unmeasured]:
    spread = sorted({t.label for t in view.of("serving") if (t.ep or 1) > 1})
    if spread and not view.of("a2a"):
        what = "how much of it is the expert collective's"
        yield Unmeasured(what, f"no all-to-all trial stands beside {', '.join(spread)}")


def _standing(view: View) -> Iterator[Unmeasured]:
    """Ranks that were not asked directly, and engines of which nobody saw what they left."""
    asked = {trial.label for trial, _ in view.rows("status")}
    never = [label for label in labels(view.of("serving")) if label not in asked]
    if never:
        what = f"that each rank of {', '.join(never)} answers by itself"
        yield Unmeasured(what, "no direct probe was recorded")
    if not view.tables["released"].num_rows:
        what = "that engines left no memory, process or port behind"
        yield Unmeasured(what, "no snapshot of released devices was recorded")


def _by_arm(found: Sequence[Trial]) -> Iterator[tuple[str, list[Trial]]]:
    for label in labels(found):
        yield label, [trial for trial in found if trial.label == label]
