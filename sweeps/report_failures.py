"""What went wrong or is to be doubted: failed trials, failed requests, and flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sweeps.results import Trial, doubles
from sweeps.tablefmt import Section, text_table
from sweeps.view import View, a2a_key, serving_key

Flag = tuple[str, str, str]  # arm, cell, what
_MOST_CELLS = 4  # named beside one flag


def sections(view: View) -> list[Section]:
    """Failed trials, failed requests and flags: each says so when there are none."""
    return [_failed_trials(view), _failed_requests(view), _flags(view)]


def place(trial: Trial) -> tuple[str, str]:
    """Arm and cell of a trial, in words, with its repeat."""
    return trial.label, f"{trial.cell}, repeat {trial.repeat}"


def _failed_trials(view: View) -> Section:
    rows = [(*place(t), t.status, t.error) for t in view.trials if t.status != "ok"]
    title = "Failed trials"
    if not rows:
        return Section(title, ("None.",))
    text = f"{len(rows)} of {len(view.trials)} trials did not end well and have no figures."
    return Section(title, (text, text_table("", ("arm", "cell", "status", "reason"), rows)))


def _failed_requests(view: View) -> Section:
    counts: Counter[tuple[str, ...]] = Counter()
    for trial, row in view.rows("requests", ("role", "state", "reason")):
        if row["state"] != "complete":
            why = row["reason"] or "no reason recorded"
            counts[(*place(trial), row["role"], row["state"], why)] += 1
    title = "Failed requests"
    if not counts:
        return Section(title, ("None.",))
    columns = ("arm", "cell", "role", "state", "reason", "requests")
    return Section(title, (text_table("", columns, [(*k, n) for k, n in counts.items()]),))


def _flags(view: View) -> Section:
    found = [*_trial_flags(view), *_cell_flags(view), *_request_flags(view)]
    found += [*_ledger_flags(view), *_operation_flags(view), *_data_flags(view)]
    title = "Flags"
    if not found:
        return Section(title, ("None.",))
    cells: dict[tuple[str, str], list[str]] = {}
    for arm, cell, flag in found:
        cells.setdefault((arm, flag), []).append(cell)
    rows = [(arm, flag, _some(where)) for (arm, flag), where in cells.items()]
    return Section(title, (text_table("", ("arm", "flag", "cells"), rows),))


def _some(cells: list[str]) -> str:
    """The first cells, and how many more there are."""
    more = f"; and {len(cells) - _MOST_CELLS} more" if len(cells) > _MOST_CELLS else ""
    return "; ".join(cells[:_MOST_CELLS]) + more


def _trial_flags(view: View) -> Iterator[Flag]:
    for trial in view.trials:
        if trial.status != "ok":
            continue
        if trial.transport_status == "contradicted":
            asked, seen = trial.transport_asked, trial.transport_seen
            yield (*place(trial), f"asked for transport {asked}, but {seen} was seen")
        elif trial.transport_status not in ("proved", "not_applicable"):
            yield (*place(trial), f"transport {trial.transport_asked} is unproved")
        if trial.shared_gpu:
            yield (*place(trial), "several ranks shared one GPU")


def _cell_flags(view: View) -> Iterator[Flag]:
    for trial, cell in view.rows("cells"):
        if cell["client_lag_flag"]:
            lag_ms = (cell["client_lag_p99_ns"] or 0) / 1e6
            yield (*place(trial), f"client lag: p99 {lag_ms:.3f} ms, the client was too slow")
        if cell["plausibility"]:
            yield (*place(trial), f"plausibility: {cell['plausibility']}")
        asked = min(trial.concurrency or 0, trial.requests or 0)
        got = cell["in_flight_max"]
        if got is not None and got < asked:
            yield (*place(trial), f"at most {got} requests in flight, {asked} asked for")


def _request_flags(view: View) -> Iterator[Flag]:
    counted: Counter[tuple[str, str]] = Counter()
    by_text: Counter[tuple[str, str]] = Counter()
    for trial, row in view.rows("requests", ("role", "completion_tokens_source", "token_rule")):
        if row["role"] == "measured":
            counted[place(trial)] += row["completion_tokens_source"] == "text_chunks"
            by_text[place(trial)] += row["token_rule"] == "text"
    for at, n in counted.items():
        if n:
            yield (*at, f"completion tokens of {n} requests were counted from text, not from usage")
    for at, n in by_text.items():
        if n:
            yield (*at, f"tokens of {n} requests were recognised by their text: empty ones escape")


def _ledger_flags(view: View) -> Iterator[Flag]:
    wrong = {
        (place(trial), row["endpoint"])
        for trial, row in view.rows("ledger", ("endpoint", "agrees"))
        if row["agrees"] is False
    }
    for at, endpoint in sorted(wrong):
        yield (*at, f"the ledger of {endpoint} disagrees")


def _operation_flags(view: View) -> Iterator[Flag]:
    for arms in view.a2a.values():
        for outcome in arms.values():
            by_repeat = {trial.repeat: trial for trial in outcome.trials}
            for repeat, metrics in outcome.metrics.items():
                for op, measured in metrics.ops.items():
                    if measured.problem:
                        yield (*place(by_repeat[repeat]), f"{op}: {measured.problem}")
                    if not measured.facts.get("checked"):
                        yield (*place(by_repeat[repeat]), f"{op} was not checked for correctness")


def _data_flags(view: View) -> Iterator[Flag]:
    """Trials that ended well but left nothing to report, and two trials in one place."""
    serving = [(o.trials, set(o.metrics)) for arms in view.serving.values() for o in arms.values()]
    a2a = [(o.trials, set(o.metrics)) for arms in view.a2a.values() for o in arms.values()]
    for ran, reported in serving + a2a:
        for trial in ran:
            if trial.status == "ok" and trial.repeat not in reported:
                yield (*place(trial), "ended well, but its samples or requests are missing")
    pairs = doubles(view.of("serving"), serving_key) + doubles(view.of("a2a"), a2a_key)
    for earlier, later in pairs:
        what = f"hidden by the later trial {later.trial_id} of the same cell, arm and repeat"
        yield (*place(earlier), what)
