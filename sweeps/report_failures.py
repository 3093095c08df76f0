"""What went wrong or is to be doubted: failed trials, failed requests, and flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import pyarrow as pa

from sweeps.report_a2a import a2a_grid, a2a_key
from sweeps.report_serving import serving_grid, serving_key
from sweeps.results import Trial, by_trial, doubles, trials
from sweeps.tablefmt import Section, text_table

Flag = tuple[str, str, str]  # arm, cell, what


def sections(tables: Mapping[str, pa.Table]) -> list[Section]:
    """Failed trials, failed requests and flags: each says so when there are none."""
    return [_failed_trials(tables), _failed_requests(tables), _flags(tables)]


def place(trial: Trial) -> tuple[str, str]:
    """Arm and cell of a trial, in words, with its repeat."""
    return trial.label, f"{trial.cell}, repeat {trial.repeat}"


def _failed_trials(tables: Mapping[str, pa.Table]) -> Section:
    rows = [(*place(t), t.status, t.error) for t in trials(tables) if t.status != "ok"]
    title = "Failed trials"
    if not rows:
        return Section(title, ("None.",))
    text = f"{len(rows)} of {len(trials(tables))} trials did not end well and have no figures."
    return Section(title, (text, text_table("", ("arm", "cell", "status", "reason"), rows)))


def _failed_requests(tables: Mapping[str, pa.Table]) -> Section:
    requests = by_trial(tables["requests"], ["role", "state", "reason"])
    counts: Counter[tuple[str, ...]] = Counter()
    for trial in trials(tables):
        for row in requests.get(trial.trial_id, []):
            if row["state"] != "complete":
                why = row["reason"] or "no reason recorded"
                counts[(*place(trial), row["role"], row["state"], why)] += 1
    title = "Failed requests"
    if not counts:
        return Section(title, ("None.",))
    columns = ("arm", "cell", "role", "state", "reason", "requests")
    return Section(title, (text_table("", columns, [(*k, n) for k, n in counts.items()]),))


def _flags(tables: Mapping[str, pa.Table]) -> Section:
    found = [*_trial_flags(tables), *_cell_flags(tables), *_request_flags(tables)]
    found += [*_operation_flags(tables), *_data_flags(tables)]
    title = "Flags"
    if not found:
        return Section(title, ("None.",))
    return Section(title, (text_table("", ("arm", "cell", "flag"), found),))


def _trial_flags(tables: Mapping[str, pa.Table]) -> Iterator[Flag]:
    for trial in trials(tables):
        if trial.status != "ok":
            continue
        if trial.transport_status == "contradicted":
            asked, seen = trial.transport_asked, trial.transport_seen
            yield (*place(trial), f"asked for transport {asked}, but {seen} was seen")
        elif trial.transport_status not in ("proved", "not_applicable"):
            yield (*place(trial), f"transport {trial.transport_asked} is unproved")
        if trial.shared_gpu:
            yield (*place(trial), "several ranks shared one GPU")


def _cell_flags(tables: Mapping[str, pa.Table]) -> Iterator[Flag]:
    cells = by_trial(tables["cells"], tables["cells"].schema.names[2:])
    for trial in trials(tables, "serving"):
        for cell in cells.get(trial.trial_id, []):
            if cell["client_lag_flag"]:
                lag_ms = (cell["client_lag_p99_ns"] or 0) / 1e6
                yield (*place(trial), f"client lag: p99 {lag_ms:.3f} ms, the client was too slow")
            if cell["plausibility"]:
                yield (*place(trial), f"plausibility: {cell['plausibility']}")
            asked = min(trial.concurrency or 0, trial.requests or 0)
            if cell["in_flight_max"] is not None and cell["in_flight_max"] < asked:
                got = cell["in_flight_max"]
                yield (*place(trial), f"at most {got} requests in flight, {asked} asked for")


def _request_flags(tables: Mapping[str, pa.Table]) -> Iterator[Flag]:
    requests = by_trial(tables["requests"], ["role", "completion_tokens_source", "token_rule"])
    for trial in trials(tables, "serving"):
        rows = [r for r in requests.get(trial.trial_id, []) if r["role"] == "measured"]
        counted = sum(r["completion_tokens_source"] == "text_chunks" for r in rows)
        if counted:
            what = f"completion tokens of {counted} requests were counted from text, not usage"
            yield (*place(trial), what)
        by_text = sum(r["token_rule"] == "text" for r in rows)
        if by_text:
            what = f"tokens of {by_text} requests were recognised by their text: empty ones escape"
            yield (*place(trial), what)


def _operation_flags(tables: Mapping[str, pa.Table]) -> Iterator[Flag]:
    for arms in a2a_grid(tables).values():
        for outcome in arms.values():
            by_repeat = {trial.repeat: trial for trial in outcome.trials}
            for repeat, metrics in outcome.metrics.items():
                for op, measured in metrics.ops.items():
                    if measured.problem:
                        yield (*place(by_repeat[repeat]), f"{op}: {measured.problem}")
                    if not measured.facts.get("checked"):
                        yield (*place(by_repeat[repeat]), f"{op} was not checked for correctness")


def _data_flags(tables: Mapping[str, pa.Table]) -> Iterator[Flag]:
    """Trials that ended well but left nothing to report, and two trials in one place."""
    grids = [*serving_grid(tables).values(), *a2a_grid(tables).values()]
    for outcome in [outcome for arms in grids for outcome in arms.values()]:
        for trial in outcome.trials:
            if trial.status == "ok" and trial.repeat not in outcome.metrics:
                yield (*place(trial), "ended well, but its samples or requests are missing")
    pairs = doubles(trials(tables, "serving"), serving_key) + doubles(
        trials(tables, "a2a"), a2a_key
    )
    for earlier, later in pairs:
        what = f"hidden by the later trial {later.trial_id} of the same cell, arm and repeat"
        yield (*place(earlier), what)
