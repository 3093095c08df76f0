"""The published tables, row by row. Numbers are decimals, so that they print as published.

Sources: `external_dp.csv`, a published comparison of wide TP with External DP over TCP and
RDMA; `pplx_garden.csv`, the published all-to-all medians of three libraries. There the
provenance is `author_rerun` for values that the table's author measured again, and `upstream`
for values taken over from the upstream project's table.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from importlib import resources
from typing import TypeVar

_Row = TypeVar("_Row")

WIDE_TP = "wide_tp"
TCP = "external_dp_tcp"
RDMA = "external_dp_rdma"
ARMS = (WIDE_TP, TCP, RDMA)


@dataclass(frozen=True)
class ServingRow:
    """One arm in one cell of the published serving table; None where nothing was published."""

    arm: str
    shape: str
    concurrency: int
    prompt_tokens_min: int | None
    prompt_tokens_max: int | None
    requests_ok: int | None
    requests_total: int | None
    ttft_p50_ms: Decimal | None
    ttft_p95_ms: Decimal | None
    tpot_p50_ms: Decimal | None
    itl_p99_ms: Decimal | None
    output_tok_per_s: Decimal | None
    requests_per_s: Decimal | None


@dataclass(frozen=True)
class AllToAllRow:
    """One median of the published all-to-all table. status: ok | crash | not_measured."""

    workload: str
    tokens: int
    phase: str
    ep_size: int
    backend: str
    transport: str
    provenance: str
    status: str
    median_us: Decimal | None


@dataclass(frozen=True)
class PublishedClaim:
    """A figure as it was published, with its digits."""

    id: str
    claim: str
    published: Decimal


def external_dp() -> tuple[ServingRow, ...]:
    """Rows of the published serving table."""
    return tuple(_typed(ServingRow, row) for row in _rows("external_dp.csv"))


def pplx_garden() -> tuple[AllToAllRow, ...]:
    """Rows of the published all-to-all table."""
    return tuple(_typed(AllToAllRow, row) for row in _rows("pplx_garden.csv"))


def claims() -> tuple[PublishedClaim, ...]:
    """The published figures that follow from the serving table."""
    return tuple(_typed(PublishedClaim, row) for row in _rows("claims.csv"))


def _rows(name: str) -> Iterator[dict[str, str]]:
    text = resources.files("sweeps.published").joinpath(name).read_text(encoding="utf-8")
    yield from csv.DictReader(text.splitlines())


def _typed(kind: type[_Row], row: dict[str, str]) -> _Row:
    """Build a row from its text; a field's annotation names its type."""
    names = {f.name: str(f.type) for f in fields(kind)}  # type: ignore[arg-type]
    if set(row) != set(names):
        raise ValueError(f"columns {sorted(row)} are not those of {kind.__name__}")
    return kind(**{name: _value(text, names[name]) for name, text in row.items()})


def _value(text: str, kind: str) -> str | int | Decimal | None:
    if not text and kind.endswith("None"):
        return None
    if kind.startswith("str"):
        return text
    try:
        return int(text) if kind.startswith("int") else Decimal(text)
    except (ValueError, InvalidOperation) as error:
        raise ValueError(f"'{text}' is no {kind} of a published table") from error
