"""The ledger of a cell: what client, router and engines counted, endpoint by endpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from serving.load.records import RequestRecord

ALL_ROLES = "all"
UNKNOWN = "?"
RouterCounts = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Endpoint -> role -> counter -> count, as the router gives them."""
EngineCounts = Mapping[str, Mapping[str, int]]
"""Endpoint -> `complete`, `aborted`, `failed` -> count; engines know no roles."""


@dataclass(frozen=True)
class LedgerRow:
    """One endpoint and role of a cell; a row of the `ledger` table. None: nobody counted.

    `agrees` is None where there is only one count, so that nothing can be compared.
    """

    endpoint: str
    role: str
    client_sent: int | None = None
    client_complete: int | None = None
    client_failed: int | None = None
    client_aborted: int | None = None
    router_forwarded: int | None = None
    router_complete: int | None = None
    router_failed: int | None = None
    router_aborted: int | None = None
    router_retried: int | None = None
    engine_complete: int | None = None
    engine_aborted: int | None = None
    agrees: bool | None = True

    def as_dict(self) -> dict[str, Any]:
        """Columns of the `ledger` table after its key."""
        return asdict(self)


def reconcile(
    records: Sequence[RequestRecord],
    endpoints: Sequence[str],
    router: RouterCounts | None,
    engines: EngineCounts | None,
) -> list[LedgerRow]:
    """Puts three counts side by side, per role and in total.

    Args:
        records: The cell's requests. One without an endpoint belongs to the only one there is,
            or, where there are several, to `?`: nobody knows who took it. Where no request
            is known to have gone to one of them (a foreign router), only the sums compare.
        endpoints: Names in rank order.
        router: The router's counters over the cell (differences), or None without a router.
        engines: The engines' counters over the cell, or None where they cannot be read.
    """
    placed = {record.endpoint for record in records} & set(endpoints)
    if router is None and len(endpoints) > 1 and not placed:
        return _sums_only(records, endpoints, engines)
    only = endpoints[0] if len(endpoints) == 1 else UNKNOWN
    counted = _counted(router or {})
    roles = sorted({record.role for record in records} | {role for _, role in counted})
    seen = {r.endpoint or only for r in records} | {name for name, _ in counted}
    rows: list[LedgerRow] = []
    for name in [*endpoints, *sorted(seen - set(endpoints))]:
        mine = [record for record in records if (record.endpoint or only) == name]
        per_role = [_row(name, role, mine, router) for role in roles]
        rows += [row for row in per_role if row.client_sent or (name, row.role) in counted]
        rows.append(_total(name, per_role, engines))
    return rows


def _counted(router: RouterCounts) -> set[tuple[str, str]]:
    """Endpoints and roles for which the router counted anything, whoever sent it."""
    return {
        (name, role)
        for name, roles in router.items()
        for role, counts in roles.items()
        if any(counts.values())
    }


def _sums_only(
    records: Sequence[RequestRecord], endpoints: Sequence[str], engines: EngineCounts | None
) -> list[LedgerRow]:
    counts = engines or {}
    summed = {
        key: sum(counts.get(name, {}).get(key, 0) for name in endpoints)
        for key in ("complete", "aborted")
    }
    ranks = [
        LedgerRow(
            name,
            ALL_ROLES,
            engine_complete=counts.get(name, {}).get("complete"),
            engine_aborted=counts.get(name, {}).get("aborted"),
            agrees=None,
        )
        for name in endpoints
    ]
    anywhere = [replace(record, endpoint=UNKNOWN) for record in records]
    together = None if engines is None else {UNKNOWN: summed}
    return [*ranks, *reconcile(anywhere, [UNKNOWN], None, together)]


def difference(after: RouterCounts, before: RouterCounts) -> RouterCounts:
    """Counts over a cell from the running counts at its ends."""
    return {
        name: {
            role: {
                key: count - before.get(name, {}).get(role, {}).get(key, 0)
                for key, count in counts.items()
            }
            for role, counts in roles.items()
        }
        for name, roles in after.items()
    }


def disagreement(rows: Sequence[LedgerRow]) -> str:
    """The rows that disagree, in words; empty when all agree."""
    return "; ".join(
        f"{row.endpoint} ({row.role}): client sent {row.client_sent}, complete "
        f"{row.client_complete}{_aborted(row.client_aborted)}; router forwarded "
        f"{_known(row.router_forwarded)}, complete {_known(row.router_complete)}"
        f"{_aborted(row.router_aborted)}; engine complete {_known(row.engine_complete)}"
        f"{_aborted(row.engine_aborted)}"
        for row in rows
        if row.agrees is False
    )


def _row(
    name: str, role: str, mine: Sequence[RequestRecord], router: RouterCounts | None
) -> LedgerRow:
    sent = [r for r in mine if r.role == role and r.sent_ns is not None]
    row = LedgerRow(
        endpoint=name,
        role=role,
        client_sent=len(sent),
        client_complete=sum(r.state == "complete" for r in sent),
        client_failed=sum(r.state == "failed" for r in sent),
        client_aborted=sum(r.state == "aborted" for r in sent),
    )
    if router is None:
        return row
    counts = router.get(name, {}).get(role, {})
    row = replace(
        row,
        router_forwarded=counts.get("forwarded", 0),
        router_complete=counts.get("complete", 0),
        router_failed=counts.get("failed", 0),
        router_aborted=counts.get("aborted", 0),
        router_retried=counts.get("retried", 0),
    )
    agrees = (row.client_sent, row.client_complete) == (row.router_forwarded, row.router_complete)
    # What failed at the client may be an abort to the router: a request past its deadline is.
    given_up = len(sent) - (row.client_complete or 0)
    agrees = agrees and (row.client_aborted or 0) <= (row.router_aborted or 0) <= given_up
    return replace(row, agrees=agrees and row.router_retried == 0)


def _total(name: str, rows: Sequence[LedgerRow], engines: EngineCounts | None) -> LedgerRow:
    sums: dict[str, Any] = {}
    for field in LedgerRow.__dataclass_fields__:
        if field.startswith(("client_", "router_")):
            values = [getattr(row, field) for row in rows]
            sums[field] = None if None in values else sum(values)
    total = LedgerRow(name, ALL_ROLES, **sums)
    agrees = all(row.agrees for row in rows)
    if engines is not None:
        counts = engines.get(name, {})
        total = replace(
            total,
            engine_complete=counts.get("complete", 0),
            engine_aborted=counts.get("aborted", 0),
        )
        agrees = agrees and _engine_agrees(total)
    return replace(total, agrees=agrees)


def _engine_agrees(total: LedgerRow) -> bool:
    """Whether an engine completed what the client did.

    It may have completed a request that the client aborted, before it heard of that; and some
    engines, vLLM 0.30 among them, count no request that a client aborts.
    """
    complete, aborted = total.engine_complete or 0, total.engine_aborted or 0
    late = complete - (total.client_complete or 0)
    balanced = complete + aborted <= (total.client_sent or 0)
    return 0 <= late <= (total.client_aborted or 0) and balanced


def _aborted(count: int | None) -> str:
    return f", aborted {count}" if count else ""


def _known(count: int | None) -> str:
    return "?" if count is None else str(count)
