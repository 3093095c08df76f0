"""Who was there: groups that were started twice, the registration of every arm's ranks, and what
an arm left when it had gone."""

from __future__ import annotations

import json
from typing import Any

from sweeps.results import Trial
from sweeps.tablefmt import Section, Table, text_table
from sweeps.view import View

Row = dict[str, Any]


def sections(view: View) -> list[Section]:
    """Restarts, the registration table and the released devices, as far as they were recorded."""
    found = _restarts(view)
    if view.tables["status"].num_rows:
        text = (
            "At the end of each arm's last cell: what the router said of each rank, and the time "
            "to one token that was asked of the rank itself, not streamed, before the arm's first "
            "cell and after its last."
        )
        found.append(Section("Registration", (text, _registration(view))))
    if view.tables["released"].num_rows:
        text = "What the machines held once the engines of an arm had gone."
        found.append(Section("Released", (text, _released(view))))
    return found


def brief(view: View) -> list[Section]:
    """Restarts; all of it where a rank did not answer or something was left behind."""
    lost = [row for _, row in view.rows("status") if row["probe_error"]]
    left = [row for _, row in view.rows("released") if row["left_behind"]]
    return sections(view) if lost or left else _restarts(view)


def _restarts(view: View) -> list[Section]:
    """Arms whose engines came up at the second start only, each reason once."""
    found = dict.fromkeys((t.label, t.restarted_for) for t in view.trials if t.restarted_for)
    if not found:
        return []
    text = (
        "Start-up of these groups lost a race for a port. The whole group was ended and started "
        "once more; every number is from the second start."
    )
    return [Section("Restarts", (text, text_table("", ("arm", "reason"), list(found))))]


def _registration(view: View) -> Table:
    first: dict[tuple[str, str], Row] = {}
    last: dict[tuple[str, str], Row] = {}
    for trial, row in view.rows("status"):
        key = (trial.label, _rank(trial, row))
        if row["when"] == "before":
            first.setdefault(key, row)
        else:
            last[key] = row
    body = [
        (*key, *_group(row), *[_yes(row[k]) for k in ("registered", "healthy", "in_selection")],
         row["circuit"] or "", _token(first.get(key)), _token(row))
        for key, row in last.items()
    ]  # fmt: skip
    columns = ("arm", "rank", "load balance", "layout", "ready", "registered", "healthy",
               "in selection", "circuit", "token before", "token after")  # fmt: skip
    return text_table("", columns, body)


def _rank(trial: Trial, row: Row) -> str:
    endpoint: str = row["endpoint"]
    return endpoint.removeprefix("engine:").removeprefix(f"{trial.arm}:")


def _group(row: Row) -> tuple[str, str, str]:
    if row["load_balance"] is None:
        return "no router", "", ""
    declared = json.loads(row["parallelism"] or "{}")
    layout = f"TP {declared['tp']} x DP {declared['dp']}" if declared else ""
    return row["load_balance"], layout, f"{row['ready']} of {row['desired']}"


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "NO"


def _token(row: Row | None) -> str:
    """Time to one token in ms, or the beginning of why none came."""
    if row is None:
        return ""
    if row["probe_ns"] is None:
        return f"NONE: {(row['probe_error'] or '')[:60]}"
    return f"{row['probe_ns'] / 1e6:.0f} ms"


def _released(view: View) -> Table:
    body = [
        (
            trial.label,
            row["node"],
            row["gpu"] or "no GPU",
            "" if row["memory_used_mib"] is None else f"{row['memory_used_mib']:.0f}",
            "" if row["processes"] is None else row["processes"],
            row["left_behind"] or "nothing",
        )
        for trial, row in view.rows("released")
    ]
    columns = ("last arm", "machine", "GPU", "MiB in use", "processes", "processes or ports left")
    return text_table("", columns, body)
