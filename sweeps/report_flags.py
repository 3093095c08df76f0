"""What is to be doubted in trials that ended well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from sweeps.report_failures import bad_trials
from sweeps.results import Trial, doubles, labels
from sweeps.tablefmt import Section, text_table
from sweeps.view import View, a2a_key, serving_key


@dataclass(frozen=True)
class Flag:
    """A doubt about one trial: what every such doubt shares, and what is particular to it."""

    arm: str
    cell: str
    what: str
    detail: str = ""

    @property
    def where(self) -> str:
        """Cell and detail."""
        return f"{self.cell}: {self.detail}" if self.detail else self.cell


def flags(view: View) -> list[Flag]:
    """Every flag of a sweep; a failed trial has its reason, and needs none."""
    found = [*_transport_flags(view), *_cell_flags(view), *_request_flags(view)]
    found += [*_ledger_flags(view), *_operation_flags(view), *_data_flags(view)]
    failed = {view.place(trial) for trial in bad_trials(view)}
    return [flag for flag in found if (flag.arm, flag.cell) not in failed]


def _kinds(view: View) -> list[tuple[str, str, list[Flag]]]:
    """Flags of one arm that share what they say, arms in the order of the trials."""
    grouped: dict[tuple[str, str], list[Flag]] = {}
    for flag in flags(view):
        grouped.setdefault((flag.arm, flag.what), []).append(flag)
    order = labels(view.trials)
    return [(*k, grouped[k]) for k in sorted(grouped, key=lambda key: order.index(key[0]))]


def sections(view: View) -> list[Section]:
    """All flags with every cell they are about; nothing where there are none."""
    rows = [
        (arm, what, "; ".join(flag.where for flag in group)) for arm, what, group in _kinds(view)
    ]
    return [Section("Flags", (text_table("", ("arm", "flag", "cells"), rows),))] if rows else []


def brief(view: View) -> list[Section]:
    """One line for each kind of flag: how many trials it is about, and one of them."""
    trials = Counter(trial.label for trial in view.trials)
    rows = [
        (arm, what, f"{len({flag.cell for flag in group})} of {trials[arm]}", group[0].where)
        for arm, what, group in _kinds(view)
    ]
    columns = ("arm", "flag", "trials", "for example")
    return [Section("Flags", (text_table("", columns, rows),))] if rows else []


def _transport_flags(view: View) -> Iterator[Flag]:
    for trial in view.trials:
        asked, seen = trial.transport_asked, trial.transport_seen
        if trial.transport_status == "contradicted":
            yield Flag(*view.place(trial), f"asked for transport {asked}, but {seen} was seen")
        elif trial.transport_status == "unproved":
            yield Flag(*view.place(trial), f"transport {asked} is unproved")
        if trial.shared_gpu:
            yield Flag(*view.place(trial), "several ranks shared one GPU")


def _cell_flags(view: View) -> Iterator[Flag]:
    for trial, cell in view.rows("cells"):
        at = view.place(trial)
        if cell["client_lag_flag"]:
            lag_ms = (cell["client_lag_p99_ns"] or 0) / 1e6
            advice = "; load.clients=2 may help" if (trial.clients or 1) == 1 else ""
            yield Flag(*at, f"client late (p99){advice}", f"{lag_ms:.3f} ms")
        if cell["plausibility"]:
            yield Flag(*at, "plausibility", cell["plausibility"])
        asked = min(trial.concurrency or 0, trial.requests or 0)
        got = cell["in_flight_max"]
        if got is not None and got < asked:
            yield Flag(*at, "fewer in flight than asked for", f"{got} of {asked}")


def _request_flags(view: View) -> Iterator[Flag]:
    counted: Counter[tuple[str, str]] = Counter()
    by_text: Counter[tuple[str, str]] = Counter()
    for trial, row in view.rows("requests", ("role", "completion_tokens_source", "token_rule")):
        if row["role"] == "measured":
            counted[view.place(trial)] += row["completion_tokens_source"] == "text_chunks"
            by_text[view.place(trial)] += row["token_rule"] == "text"
    for found, what in (
        (counted, "completion tokens were counted from text, not from usage"),
        (by_text, "tokens were recognised by their text: empty ones escape"),
    ):
        for at, n in found.items():
            if n:
                yield Flag(*at, what, f"{n} requests")


def _ledger_flags(view: View) -> Iterator[Flag]:
    wrong = {
        (view.place(trial), row["endpoint"] or "")
        for trial, row in view.rows("ledger", ("endpoint", "agrees"))
        if row["agrees"] is False
    }
    for at, endpoint in sorted(wrong):
        yield Flag(*at, "the ledger disagrees", endpoint)


def _operation_flags(view: View) -> Iterator[Flag]:
    for arms in view.a2a.values():
        for outcome in arms.values():
            by_repeat = {trial.repeat: trial for trial in outcome.trials}
            for repeat, metrics in outcome.metrics.items():
                at = view.place(by_repeat[repeat])
                for op, measured in metrics.ops.items():
                    if measured.problem:
                        yield Flag(*at, "no headline", measured.problem)
                    if not measured.facts.get("checked"):
                        yield Flag(*at, "not checked for correctness", op)


def _data_flags(view: View) -> Iterator[Flag]:
    """Trials that ended well but left nothing to report, and two trials in one place."""
    serving = [(o.trials, set(o.metrics)) for arms in view.serving.values() for o in arms.values()]
    a2a = [(o.trials, set(o.metrics)) for arms in view.a2a.values() for o in arms.values()]
    for ran, reported in serving + a2a:
        for trial in ran:
            if trial.status == "ok" and trial.repeat not in reported:
                what = "ended well, but its samples or requests are missing"
                yield Flag(*view.place(trial), what)
    yield from (_hidden(view, *pair) for pair in doubles(view.of("serving"), serving_key))
    yield from (_hidden(view, *pair) for pair in doubles(view.of("a2a"), a2a_key))


def _hidden(view: View, earlier: Trial, later: Trial) -> Flag:
    what = "hidden by a later trial of the same cell, arm and repeat"
    return Flag(*view.place(earlier), what, later.trial_id)
