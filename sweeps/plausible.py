"""Which medians of an all-to-all table can be believed: rules fixed before looking at any table.

| severity     | rule                                                                            |
|--------------|---------------------------------------------------------------------------------|
| `impossible` | below every lower bound, whatever a library deduplicates                        |
| `impossible` | out of order with a neighbouring EP size by more than 1.5 x, and at least 3 x   |
|              | off every twin: the same backend, EP and operation inside one node, so that the |
|              | NIC's name changes nothing                                                      |
| `suspicious` | any other break of order by more than 1.1 x                                     |
| `suspicious` | dispatch slower than the combine that moves about twice the bytes               |
| `suspicious` | two backends more than 3 x apart in one cell                                    |

In order means that a larger EP size takes no less time. A rule that involves an impossible
value says nothing new, so that suspicions are about the other values only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import get_args

from ep_ray.a2a.expected import Links, expected_bound_ns
from ep_ray.a2a.rows import Dedup, row_bytes
from ep_ray.config.schema import Dtype

IMPOSSIBLE, SUSPICIOUS = "impossible", "suspicious"
_BROKEN, _TWIN, _DISORDER, _APART = 1.5, 3.0, 1.1, 3.0


@dataclass(frozen=True)
class Median:
    """One value of the table.

    Attributes:
        workload: Its label, for example `decode`.
        phase: `dispatch` or `combine`.
        ep: EP size.
        tokens: Tokens per rank.
        backend: Library.
        transport: NIC between nodes.
        source: Who measured.
        median_us: The value, microseconds.
    """

    workload: str
    phase: str
    ep: int
    tokens: int
    backend: str
    transport: str
    source: str
    median_us: float

    @property
    def column(self) -> str:
        """Heading of the column that it stands in."""
        return f"{self.backend} {self.transport} {self.source}"

    @property
    def cell(self) -> str:
        """The cell that it competes in."""
        return f"{self.workload} {self.phase} EP{self.ep}"


# Nominal rates of one GPU in one direction, bytes/s.
NVLINK_RATE, NIC_RATE = 450e9, 50e9
_NOMINAL_LINKS = Links(node_size=8, intra=NVLINK_RATE, inter=NIC_RATE)


@dataclass(frozen=True)
class Setup:
    """What the values were measured on, as far as bounds need it.

    Attributes:
        hidden: Columns per row.
        experts: Experts over all ranks.
        topk: Experts per token.
        links: Nominal rates, bytes/s per direction and rank.
    """

    hidden: int = 7168
    experts: int = 256
    topk: int = 8
    links: Links = _NOMINAL_LINKS


NOMINAL = Setup()
"""The published shape on nodes of 8 GPUs: NVLink 450 GB/s, NICs 50 GB/s per GPU."""


@dataclass(frozen=True)
class Doubt:
    """A value that breaks a rule, and how."""

    severity: str
    value: Median
    reason: str


def doubts(values: Sequence[Median], setup: Setup = NOMINAL) -> list[Doubt]:
    """Values that break a rule, impossible ones first; one doubt per value and rule.

    Args:
        values: All values of a table; cells without one are left out.
        setup: What they were measured on.
    """
    impossible = [*_below_bounds(values, setup), *_far_from_twins(values, setup)]
    bad = {doubt.value for doubt in impossible}
    rest = [value for value in values if value not in bad]
    # Order is judged between true neighbours: without the impossible value in between, the
    # sizes on both sides of it are neighbours of a kind, and a break between them still counts.
    return impossible + [*_disorder(rest), *_slow_dispatch(rest), *_far_apart(rest)]


def least_bound_us(value: Median, setup: Setup) -> float:
    """The lowest bound over all ways to deduplicate, µs: FP8 dispatch, BF16 combine; 0 at EP1."""
    dtype = Dtype.fp8 if value.phase == "dispatch" else Dtype.bf16
    bounds = [
        expected_bound_ns(
            tokens=value.tokens,
            row_bytes=row_bytes(setup.hidden, dtype),
            experts=setup.experts,
            topk=setup.topk,
            ep=value.ep,
            dedup=dedup,
            links=setup.links,
        )
        for dedup in get_args(Dedup)
    ]
    return min((bound for bound in bounds if bound is not None), default=0.0) / 1e3


def _below_bounds(values: Iterable[Median], setup: Setup) -> Iterator[Doubt]:
    for value in values:
        bound_us = least_bound_us(value, setup)
        if value.median_us < bound_us:
            reason = f"below every lower bound: the least is {bound_us:.0f} µs"
            yield Doubt(IMPOSSIBLE, value, reason)


def _far_from_twins(values: Sequence[Median], setup: Setup) -> Iterator[Doubt]:
    for small, large in _falling(values, _BROKEN):
        for value, neighbour in ((small, large), (large, small)):
            ratios = [_ratio(value, twin) for twin in _twins(value, values, setup)]
            if ratios and min(ratios) >= _TWIN:
                yield Doubt(
                    IMPOSSIBLE,
                    value,
                    f"out of order with EP{neighbour.ep} ({neighbour.median_us:g}) by "
                    f"{_ratio(value, neighbour):.1f} x, and {min(ratios):.1f} x off the same "
                    "backend over the same links inside one node",
                )


def _twins(value: Median, values: Sequence[Median], setup: Setup) -> list[Median]:
    if value.ep > setup.links.node_size:
        return []
    same = [v for v in values if (v.cell, v.backend) == (value.cell, value.backend)]
    return [v for v in same if v.column != value.column]


def _disorder(values: Sequence[Median]) -> Iterator[Doubt]:
    for small, large in _falling(values, _DISORDER):
        ratio = _ratio(small, large)
        yield Doubt(
            SUSPICIOUS, small, f"{ratio:.2f} x the value at EP{large.ep} ({large.median_us:g})"
        )


def _slow_dispatch(values: Sequence[Median]) -> Iterator[Doubt]:
    combines = {(v.workload, v.ep, v.column): v for v in values if v.phase == "combine"}
    for value in values:
        combine = combines.get((value.workload, value.ep, value.column))
        if value.phase == "dispatch" and combine and value.median_us > combine.median_us:
            yield Doubt(
                SUSPICIOUS,
                value,
                f"slower than its combine ({combine.median_us:g}), which moves about twice the "
                "bytes: layout or host synchronisation may be inside the timed region",
            )


def _far_apart(values: Sequence[Median]) -> Iterator[Doubt]:
    for _, group in groupby(sorted(values, key=lambda v: v.cell), key=lambda v: v.cell):
        cell = list(group)
        slowest = max(cell, key=lambda v: v.median_us)
        others = [v for v in cell if v.backend != slowest.backend]
        fastest = min(others, key=lambda v: v.median_us, default=slowest)
        if _ratio(slowest, fastest) > _APART:
            ratio = _ratio(slowest, fastest)
            reason = f"{ratio:.1f} x {fastest.column} ({fastest.median_us:g}) in the same cell"
            yield Doubt(SUSPICIOUS, slowest, reason)


def _falling(values: Iterable[Median], factor: float) -> Iterator[tuple[Median, Median]]:
    """Neighbouring EP sizes of a column where the smaller takes more than `factor` x the larger."""

    def column(value: Median) -> tuple[str, str, str]:
        return value.workload, value.phase, value.column

    for _, group in groupby(sorted(values, key=lambda v: (column(v), v.ep)), key=column):
        for small, large in pairwise(group):
            if small.median_us > factor * large.median_us:
                yield small, large


def _ratio(one: Median, other: Median) -> float:
    low, high = sorted((one.median_us, other.median_us))
    return high / low
