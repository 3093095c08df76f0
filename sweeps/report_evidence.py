"""What stands behind the numbers: the ledger of every rank, and the proof of the transport."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sweeps.results import Trial
from sweeps.tablefmt import Section, Table, text_table
from sweeps.view import View

_CLIENT = ("client_sent", "client_complete", "client_failed", "client_aborted")
_ROUTER = ("forwarded", "complete", "failed", "aborted", "retried")
_COUNTS = (*_CLIENT, *[f"router_{name}" for name in _ROUTER], "engine_complete", "engine_aborted")
_ALL_ROLES = "all"
_MOST_EVIDENCE = 12  # lines per arm; the rest stays in the Parquet table, and is counted


def sections(view: View) -> list[Section]:
    """The ledger and the transport, as far as the sweep recorded them."""
    return [*_ledger(view), *_transport(view)]


def _ledger(view: View) -> list[Section]:
    rows = list(view.rows("ledger"))
    if not rows:
        return []
    endpoints: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for trial, row in rows:
        endpoints.setdefault((trial.label, row["endpoint"] or ""), []).append(row)
    body = [(*key, *_totals(group), _agreement(group)) for key, group in sorted(endpoints.items())]
    columns = ("arm", "endpoint", *[name.replace("_", " ") for name in _COUNTS], "agree?")
    text = (
        "Requests of all roles and cells, summed for each endpoint: sent by the client, forwarded "
        "by the router, completed by the engine. They must agree in every cell."
    )
    return [Section("Ledger", (text, text_table("", columns, body), *_disagreements(rows)))]


def _totals(rows: Sequence[dict[str, Any]]) -> list[int | None]:
    """Sums over roles and cells; a count recorded only for all roles together is taken there."""
    apart = [row for row in rows if row["role"] != _ALL_ROLES]
    together = [row for row in rows if row["role"] == _ALL_ROLES]
    totals = []
    for name in _COUNTS:
        by_role = _sum(row[name] for row in apart)
        totals.append(_sum(row[name] for row in together) if by_role is None else by_role)
    return totals


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _agreement(rows: Sequence[dict[str, Any]]) -> str:
    """`yes` only when every row agrees; a row that was not judged is named."""
    verdicts = {row["agrees"] for row in rows}
    if False in verdicts:
        return "NO"
    return "not judged" if None in verdicts else "yes"


def _disagreements(rows: Sequence[tuple[Trial, dict[str, Any]]]) -> list[Table]:
    columns = ("arm", "cell", "repeat", "endpoint", "role", *[c.replace("_", " ") for c in _COUNTS])
    body = [
        (t.label, t.cell, t.repeat, r["endpoint"], r["role"], *[r[name] for name in _COUNTS])
        for t, r in rows
        if r["agrees"] is False
    ]
    return [text_table("Where the counts disagree", columns, body)] if body else []


def _transport(view: View) -> list[Section]:
    states: dict[tuple[str, ...], int] = {}
    for trial in view.trials:
        asked, seen = trial.transport_asked or "", trial.transport_seen or ""
        key = (trial.label, asked, seen, trial.transport_status or "unproved")
        states[key] = states.get(key, 0) + 1
    columns = ("arm", "asked", "seen", "status", "trials")
    summary = text_table("", columns, [(*key, count) for key, count in states.items()])
    return [Section("Transport", (summary, *_evidence(view)))]


def _evidence(view: View) -> list[Table | str]:
    """Distinct evidence of each arm: how many trials and ranks show it, and bytes where counted."""
    groups: dict[tuple[str, ...], list[tuple[Trial, dict[str, Any]]]] = {}
    for trial, row in view.rows("transport"):
        words = [row[name] or "" for name in ("source", "transport", "evidence")]
        groups.setdefault((trial.label, *words), []).append((trial, row))
    shown: dict[str, list[tuple[object, ...]]] = {}
    for key, group in groups.items():
        shown.setdefault(key[0], []).append((*key, *_evidence_counts(group)))
    if not shown:
        return ["No evidence was recorded."]
    columns = ("arm", "source", "shows", "evidence", "ranks", "trials", "bytes seen", "expected")
    body = [line for lines in shown.values() for line in lines[:_MOST_EVIDENCE]]
    blocks: list[Table | str] = [text_table("Evidence", columns, body)]
    for label, lines in shown.items():
        if len(lines) > _MOST_EVIDENCE:
            more = len(lines) - _MOST_EVIDENCE
            blocks.append(f"{label}: {more} further lines of evidence are in transport.parquet.")
    return blocks


def _evidence_counts(group: Sequence[tuple[Trial, dict[str, Any]]]) -> tuple[object, ...]:
    return (
        len({row["rank"] for _, row in group if row["rank"] is not None}),
        len({trial.trial_id for trial, _ in group}),
        _sum(row["bytes_seen"] for _, row in group),
        _sum(row["bytes_expected"] for _, row in group),
    )
