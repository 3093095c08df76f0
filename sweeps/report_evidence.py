"""What stands behind the numbers: the ledger of every rank, and the proof of the transport."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sweeps.report_router import router_remarks
from sweeps.results import Trial, labels
from sweeps.tablefmt import Block, Section, Table, text_table
from sweeps.view import View

_COUNTS = (
    *("client_sent", "client_complete", "client_failed", "client_aborted"),
    *("router_forwarded", "router_complete", "router_failed", "router_aborted", "router_retried"),
    *("engine_complete", "engine_aborted"),
)
_BRIEF = tuple(name for name in _COUNTS if name.endswith(("sent", "forwarded", "complete")))
_ALL_ROLES = "all"
_MOST_EVIDENCE = 12  # lines per arm; the rest stays in the Parquet table, and is counted

Row = dict[str, Any]


def sections(view: View) -> list[Section]:
    """The ledger and the transport, as far as the sweep recorded them."""
    text = (
        "Requests of all roles and cells, summed for each rank: sent by the client, forwarded "
        "by the router, completed by the engine. They must agree in every cell. What the client "
        "cancelled is aborted. What never happened has no column."
    )
    rows, remarks = list(view.rows("ledger")), router_remarks(view.of("serving"))
    ledger = Section(
        "Ledger", (text, *remarks, _ledger(rows, _COUNTS), *_disagreements(view, rows))
    )
    transport = Section("Transport", (_transport(view), *_evidence(view)))
    return [ledger, transport] if rows else [transport]


def brief(view: View) -> list[Section]:
    """The counts that must agree, one line for each rank; and one line of proof for each arm."""
    rows, remarks = list(view.rows("ledger")), router_remarks(view.of("serving"))
    table = _ledger(rows, _BRIEF)
    ledger = Section("Ledger: requests of all roles and cells", (*remarks, table))
    transport = Section("Transport", (_transport(view),))
    return [ledger, transport] if rows else [transport]


def _ledger(rows: Sequence[tuple[Trial, Row]], counts: Sequence[str]) -> Table:
    ranks: dict[tuple[str, str], list[Row]] = {}
    for trial, row in rows:
        ranks.setdefault((trial.label, _rank(trial, row)), []).append(row)
    body = [(*key, _agreement(group), *_totals(group, counts)) for key, group in ranks.items()]
    return _with_counts("", ("arm", "rank", "agree?"), counts, body)


def _with_counts(
    title: str, first: Sequence[str], counts: Sequence[str], body: Sequence[tuple[object, ...]]
) -> Table:
    """A table that ends in these counts, without those of failures that never happened."""
    at = len(first)
    shown = [i for i, name in enumerate(counts) if name in _BRIEF or any(r[at + i] for r in body)]
    headings = [counts[i].replace("_", "\n", 1) for i in shown]
    rows = [(*row[:at], *[row[at + i] for i in shown]) for row in body]
    return text_table(title, (*first, *headings), rows)


def _rank(trial: Trial, row: Row) -> str:
    """The endpoint without what its arm's name says already."""
    endpoint: str = row["endpoint"] or "unknown"
    return endpoint.removeprefix("engine:").removeprefix(f"{trial.arm}:")


def _totals(rows: Sequence[Row], counts: Sequence[str]) -> list[int | None]:
    """Sums over roles and cells; a count recorded only for all roles together is taken there."""
    apart = [row for row in rows if row["role"] != _ALL_ROLES]
    together = [row for row in rows if row["role"] == _ALL_ROLES]
    totals = []
    for name in counts:
        by_role = _sum(row[name] for row in apart)
        totals.append(_sum(row[name] for row in together) if by_role is None else by_role)
    return totals


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _agreement(rows: Sequence[Row]) -> str:
    """`yes` only when every row agrees; a row that was not judged is named."""
    verdicts = {row["agrees"] for row in rows}
    if False in verdicts:
        return "NO"
    return "not judged" if None in verdicts else "yes"


def _disagreements(view: View, rows: Sequence[tuple[Trial, Row]]) -> list[Table]:
    body = [
        (*view.place(t), _rank(t, r), r["role"], *[r[name] for name in _COUNTS])
        for t, r in rows
        if r["agrees"] is False
    ]
    first = ("arm", "cell", "rank", "role")
    return [_with_counts("Where the counts disagree", first, _COUNTS, body)] if body else []


def _transport(view: View) -> Table:
    """One line for each arm and outcome, with what the evidence shows."""
    trials: dict[tuple[str, ...], set[str]] = {}
    for trial in view.trials:
        asked, seen = trial.transport_asked or "", trial.transport_seen or ""
        key = (trial.label, asked, seen, _status(trial))
        trials.setdefault(key, set()).add(trial.trial_id)
    shows: dict[str, list[tuple[str, str | None]]] = {}
    for trial, row in view.rows("transport", ("source", "transport")):
        shows.setdefault(trial.trial_id, []).append((row["source"], row["transport"]))
    order = labels(view.trials)
    rows = [
        (*key, len(ids), _summary([pair for i in ids for pair in shows.get(i, [])]))
        for key, ids in sorted(trials.items(), key=lambda item: order.index(item[0][0]))
    ]
    return text_table("", ("arm", "asked", "seen", "status", "trials", "evidence"), rows)


def _status(trial: Trial) -> str:
    return (trial.transport_status or "not recorded").replace("_", " ")


def _summary(found: Sequence[tuple[str, str | None]]) -> str:
    """`log: ib x16, interface: nothing x2`, or `none`."""
    counts = Counter(f"{source}: {shown or 'nothing'}" for source, shown in found)
    return ", ".join(f"{words} x{n}" for words, n in counts.items()) or "none"


def _evidence(view: View) -> list[Block]:
    """Distinct evidence of each arm: how many trials and ranks show it, and bytes where counted."""
    groups: dict[tuple[str, ...], list[tuple[Trial, Row]]] = {}
    for trial, row in view.rows("transport"):
        words = [row["source"] or "", row["transport"] or "", _like(row["evidence"])]
        groups.setdefault((trial.label, *words), []).append((trial, row))
    shown: dict[str, list[tuple[object, ...]]] = {}
    for key, group in groups.items():
        shown.setdefault(key[0], []).append((*key, *_evidence_counts(group)))
    if not shown:
        return []
    columns = ("arm", "source", "shows", "evidence", "ranks", "trials", "bytes seen", "expected")
    body = [line for lines in shown.values() for line in lines[:_MOST_EVIDENCE]]
    blocks: list[Block] = [text_table("Evidence", columns, body)]
    for arm, lines in shown.items():
        if len(lines) > _MOST_EVIDENCE:
            more = len(lines) - _MOST_EVIDENCE
            blocks.append(f"{arm}: {more} further lines of evidence are in transport.parquet.")
    return blocks


def _like(evidence: str | None) -> str:
    """Evidence without its byte counts, which differ each time and have columns of their own."""
    return re.sub(r"\d{1,3}(,\d{3})+", "...", evidence or "")


def _evidence_counts(group: Sequence[tuple[Trial, Row]]) -> tuple[object, ...]:
    return (
        len({row["rank"] for _, row in group if row["rank"] is not None}),
        len({trial.trial_id for trial, _ in group}),
        _sum(row["bytes_seen"] for _, row in group),
        _sum(row["bytes_expected"] for _, row in group),
    )
