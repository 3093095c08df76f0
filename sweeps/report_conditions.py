"""Under which conditions a sweep ran: definitions, versions, hardware and readings of it."""

from __future__ import annotations

import json

from sweeps.tablefmt import Section, Table, text_table
from sweeps.view import View

_SERVING = (
    ("load", "closed loop: as many requests in flight as the concurrency says, while any remain"),
    ("complete", "HTTP 200, no error event, a finish reason and the end marker; others failed"),
    ("latencies", "over complete measured requests; warm-up and calibration are kept apart"),
    ("percentiles", "linear interpolation over all values of a cell"),
    ("TTFT", "just before the first byte of the request to the first chunk with a token"),
    ("TPOT", "(last token - first token) / (completion tokens - tokens in the first chunk)"),
    ("chunk gap", "time between token-carrying chunks; published tables call its p99 ITL p99"),
    ("ITL", "chunk gap / tokens in the chunk, counted once for each of them"),
    ("tok/s", "completion tokens of complete requests / wall time of the cell"),
    (
        "steady tok/s",
        "tokens between the c-th completion and the last request sent, over that time",
    ),
)
_ALL_TO_ALL = (
    ("headline", "maximum over ranks of each iteration, then the median over iterations"),
    ("pooled", "percentiles over all ranks and iterations, as published tables have them"),
    ("cold, floor", "first iteration, slowest rank; the median empty event; nothing is subtracted"),
    ("bound", "bytes that must cross the busiest link / its rate measured in the same run"),
    ("wire GB/s", "most bytes that a rank sends or receives / headline; own share excluded"),
    ("imbalance", "most rows received by a rank / mean over ranks"),
)
_READ_BY = {"serving": _SERVING, "a2a": _ALL_TO_ALL}


def sections(view: View) -> list[Section]:
    """Definitions of what was measured, then versions, hardware and readings."""
    measures = list(dict.fromkeys(t.measure for t in view.trials))
    definitions = [
        text_table(measure, ("what", "how"), _READ_BY[measure])
        for measure in measures
        if measure in _READ_BY
    ]
    ran: list[Table | str] = [*_facts(view), *_telemetry(view)]
    return [
        Section("How it was measured", tuple(definitions)),
        Section("What it ran on", tuple(ran)),
    ]


def _facts(view: View) -> list[Table | str]:
    """Versions and hardware: each distinct value, with the arms that had it."""
    arms: dict[tuple[str, str, str], dict[str, None]] = {}
    for trial in view.trials:
        facts = {
            ("device", ""): trial.device,
            **_flat("versions", trial.versions_json),
            **_flat("hardware", trial.hardware_json),
        }
        for (group, name), value in facts.items():
            arms.setdefault((group, name, str(value)), {})[trial.label] = None
    everyone = {t.label for t in view.trials}
    rows = [
        (*key, "all" if set(seen) == everyone else ", ".join(seen)) for key, seen in arms.items()
    ]
    return [text_table("", ("", "name", "value", "arms"), rows)] if rows else ["Not recorded."]


def _flat(group: str, text: str | None) -> dict[tuple[str, str], object]:
    """The entries of a JSON object; nested values stay JSON, what is no object stays text."""
    try:
        facts = json.loads(text or "{}")
    except ValueError:
        facts = text
    if not isinstance(facts, dict):
        return {(group, ""): facts}
    return {
        (group, name): json.dumps(value) if isinstance(value, dict | list) else value
        for name, value in facts.items()
    }


def _telemetry(view: View) -> list[Table]:
    """Least, median and greatest of each reading, over the whole sweep."""
    if view.tables["telemetry"].num_rows == 0:
        return []
    rows = view.tables["telemetry"].group_by(["node", "source", "name"], use_threads=False)
    sums = rows.aggregate(
        [("value", "min"), ("value", "approximate_median"), ("value", "max"), ("value", "count")]
    )
    body = [
        (row["node"], row["source"], row["name"], row["value_count"])
        + tuple(f"{row[f'value_{end}']:g}" for end in ("min", "approximate_median", "max"))
        for row in sums.to_pylist()
        if row["value_count"]
    ]
    columns = ("node", "source", "reading", "samples", "least", "median", "greatest")
    return [text_table("Readings over the sweep", columns, body)]
