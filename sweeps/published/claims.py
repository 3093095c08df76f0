"""Each figure that was published about the serving table, computed again from the table.

A function takes the rows and returns the figure, or None where the rows do not give one. The
comparison is made at the published number of digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from sweeps.published.data import ARMS, RDMA, TCP, WIDE_TP, PublishedClaim, ServingRow

Rows = Sequence[ServingRow]
CellKey = tuple[str, int]

_SHORT: CellKey = ("1024/256", 64)
_LONG: CellKey = ("4096/128", 64)
# The run's protocol, which the table does not hold.
_WARMUPS_PER_CELL = 4
_CALIBRATION_PER_ARM = 1


@dataclass(frozen=True)
class Verdict:
    """A published figure beside the one from the data; `computed` keeps all its digits."""

    id: str
    claim: str
    published: Decimal
    computed: Decimal | None

    @property
    def rounded(self) -> Decimal | None:
        """The computed figure at the published number of digits, halves away from zero."""
        if self.computed is None:
            return None
        return self.computed.quantize(self.published, rounding=ROUND_HALF_UP)

    @property
    def equal(self) -> bool:
        """Whether both figures agree at the published number of digits."""
        return self.rounded is not None and self.rounded == self.published


def check(published: Sequence[PublishedClaim], rows: Rows) -> list[Verdict]:
    """Every published figure beside the one that `rows` give."""
    return [Verdict(c.id, c.claim, c.published, COMPUTE[c.id](rows)) for c in published]


def by_cell(rows: Rows, arm: str) -> dict[CellKey, ServingRow]:
    """The rows of an arm by (shape, concurrency)."""
    return {(r.shape, r.concurrency): r for r in rows if r.arm == arm}


def _pairs(rows: Rows, metric: str, a: str, b: str) -> dict[CellKey, tuple[Decimal, Decimal]]:
    """Both arms' values of a metric in the cells where both were published."""
    left, right = by_cell(rows, a), by_cell(rows, b)
    cells = [cell for cell in left if cell in right]
    both = {cell: (getattr(left[cell], metric), getattr(right[cell], metric)) for cell in cells}
    return {cell: pair for cell, pair in both.items() if None not in pair}


def _ratios(rows: Rows, metric: str, a: str, b: str) -> dict[CellKey, Decimal]:
    return {cell: x / y for cell, (x, y) in _pairs(rows, metric, a, b).items()}


def _throughput_ratios(rows: Rows) -> list[Decimal]:
    return list(_ratios(rows, "output_tok_per_s", WIDE_TP, TCP).values())


def _tpot_ratios_alone(rows: Rows) -> list[Decimal]:
    ratios = _ratios(rows, "tpot_p50_ms", TCP, WIDE_TP)
    return [ratio for (_, concurrency), ratio in ratios.items() if concurrency == 1]


def _ratio_at(metric: str, a: str, b: str, cell: CellKey) -> Callable[[Rows], Decimal | None]:
    return lambda rows: _ratios(rows, metric, a, b).get(cell)


def _cells_lower(metric: str, a: str, b: str) -> Callable[[Rows], Decimal]:
    """Counts the cells in which arm `a` has the lower value of a metric."""
    return lambda rows: Decimal(sum(x < y for x, y in _pairs(rows, metric, a, b).values()))


def _measured_per_arm(rows: Rows) -> Decimal | None:
    """Measured requests of an arm, if all arms have equally many."""
    totals = {sum(r.requests_total or 0 for r in rows if r.arm == arm) for arm in ARMS}
    return Decimal(totals.pop()) if len(totals) == 1 else None


def _completions(rows: Rows) -> Decimal | None:
    """Completions of one External DP arm: measured, warm-up and calibration."""
    totals = set()
    for arm in (TCP, RDMA):
        cells = by_cell(rows, arm).values()
        measured = sum(cell.requests_ok or 0 for cell in cells)
        totals.add(measured + _WARMUPS_PER_CELL * len(cells) + _CALIBRATION_PER_ARM)
    return Decimal(totals.pop()) if len(totals) == 1 else None


COMPUTE: dict[str, Callable[[Rows], Decimal | None]] = {
    "E1": lambda rows: min(_throughput_ratios(rows), default=None),
    "E2": lambda rows: max(_throughput_ratios(rows), default=None),
    "E3": lambda rows: min(_tpot_ratios_alone(rows), default=None),
    "E4": lambda rows: max(_tpot_ratios_alone(rows), default=None),
    "E5": _ratio_at("ttft_p50_ms", WIDE_TP, TCP, _SHORT),
    "E6": _ratio_at("ttft_p50_ms", WIDE_TP, TCP, _LONG),
    "E7": _ratio_at("ttft_p50_ms", TCP, RDMA, _SHORT),
    "E8": _ratio_at("output_tok_per_s", RDMA, TCP, _SHORT),
    "E9": _ratio_at("ttft_p50_ms", TCP, RDMA, _LONG),
    "E10": _ratio_at("output_tok_per_s", RDMA, TCP, _LONG),
    "E11": _ratio_at("ttft_p50_ms", WIDE_TP, RDMA, _SHORT),
    "E12": _ratio_at("output_tok_per_s", RDMA, WIDE_TP, _SHORT),
    "E13": _ratio_at("ttft_p50_ms", WIDE_TP, RDMA, _LONG),
    "E14": _ratio_at("output_tok_per_s", RDMA, WIDE_TP, _LONG),
    "E15": _cells_lower("output_tok_per_s", RDMA, WIDE_TP),
    "E16": _cells_lower("itl_p99_ms", WIDE_TP, RDMA),
    "E17": _measured_per_arm,
    "E18": _cells_lower("ttft_p50_ms", TCP, WIDE_TP),
    "E19": _cells_lower("itl_p99_ms", TCP, RDMA),
    "E20": _completions,
}
