"""Serving tables of a sweep: a line for each cell and arm; ratios of the first arm to others."""

from __future__ import annotations

from collections.abc import Sequence

from serving.load.metrics import CellMetrics
from sweeps.admission import equal_batch_remark, lockstep_remark
from sweeps.report_prompts import prompts_remark
from sweeps.report_ratio import ratio_table
from sweeps.results import Outcome, labels
from sweeps.tablefmt import Block, Metric, Section, Table, Value, stacked
from sweeps.view import ServingGrid, ServingKey, View

_REQUESTS = Metric("requests", "ok/total")
_CANCELLED = Metric("cancelled", "cancelled")
LATENCY = (
    Metric("ttft_p50_ms", "TTFT p50 ms", lower_is_better=True),
    Metric("ttft_p95_ms", "TTFT p95 ms", lower_is_better=True),
    Metric("tpot_p50_ms", "TPOT p50 ms", lower_is_better=True),
    Metric("chunk_gap_p99_ms", "chunk gap p99 ms", lower_is_better=True),
    Metric("output_tokens_per_s", "tok/s", lower_is_better=False),
)
_MORE = (
    Metric("prompt_tokens", "prompt tokens"),
    Metric("requests_per_s", "requests/s", lower_is_better=False),
    Metric("steady_tokens_per_s", "steady tok/s", lower_is_better=False),
    Metric("ttft_p99_ms", "TTFT p99 ms", lower_is_better=True),
    Metric("itl_p50_ms", "ITL p50 ms", lower_is_better=True),
    Metric("itl_p99_ms", "ITL p99 ms", lower_is_better=True),
    Metric("e2e_p50_ms", "latency p50 ms", lower_is_better=True),
)

Cells = Sequence[tuple[ServingKey, dict[str, Outcome[CellMetrics]]]]


def sections(view: View) -> list[Section]:
    """The serving tables, or nothing when the sweep did not serve."""
    grid = view.serving
    if not grid:
        return []
    arms = labels(view.of("serving"))
    blocks: list[Block] = [_sentence(grid), *_remarks(view)]
    for shape in dict.fromkeys(key.shape for key in grid):
        cells = [cell for cell in sorted_cells(grid) if cell[0].shape == shape]
        blocks.append(_table(f"{shape} tokens", cells, arms, _columns(cells)))
        blocks.append(_table(f"{shape} tokens, more", cells, arms, _MORE))
    return [Section("Serving", tuple(blocks)), *_ratios(view)]


def brief(view: View) -> list[Section]:
    """The columns of the published tables, all shapes in one table; and the ratios."""
    if not view.serving:
        return []
    arms, cells = labels(view.of("serving")), sorted_cells(view.serving)
    table = _table("", cells, arms, _columns(cells), with_shape=True)
    blocks: list[Block] = [_sentence(view.serving), *_remarks(view), table]
    return [Section("Serving", tuple(blocks)), *_ratios(view)]


def _columns(cells: Cells) -> tuple[Metric, ...]:
    """The first columns; cancelled requests are counted where there are any."""
    any_cancelled = any(cancelled(o) for _, outcomes in cells for o in outcomes.values())
    return (_REQUESTS, *([_CANCELLED] if any_cancelled else []), *LATENCY)


def _remarks(view: View) -> list[str]:
    found = view.of("serving")
    return [*prompts_remark(found), *equal_batch_remark(found), *lockstep_remark(found)]


def _ratios(view: View) -> list[Section]:
    arms = labels(view.of("serving"))
    rows = {f"{key.shape} {key.load}": found for key, found in sorted_cells(view.serving)}
    return ratio_table("Serving ratios", arms, LATENCY, rows, _whole)


def sorted_cells(grid: ServingGrid) -> Cells:
    """Cells by shape in the order of the sweep, then by concurrency or rate."""
    shapes = list(dict.fromkeys(key.shape for key in grid))

    def place(key: ServingKey) -> tuple[int, int, float]:
        return shapes.index(key.shape), key.concurrency, key.rate_per_s or 0.0

    return sorted(grid.items(), key=lambda item: place(item[0]))


def _sentence(grid: ServingGrid) -> str:
    repeats = {len(o.metrics) for outcomes in grid.values() for o in outcomes.values()} - {0}
    marked = "Marked: the better value of a cell; an arm with failed requests does not compete."
    if not repeats or max(repeats) == 1:
        return f"One run of each cell. {marked}"
    shown = f"{min(repeats)} to {max(repeats)}" if len(repeats) > 1 else f"{max(repeats)}"
    return f"Medians over {shown} repeats of each cell; requests are summed over them. {marked}"


def _table(
    title: str,
    cells: Cells,
    arms: Sequence[str],
    metrics: Sequence[Metric],
    *,
    with_shape: bool = False,
) -> Table:
    rows = [
        (
            f"{key.shape} {key.load}" if with_shape else key.load,
            {at: value for arm, o in outcomes.items() for at, value in _values(arm, o, metrics)},
        )
        for key, outcomes in cells
    ]
    return stacked(title, ("cell", "arm"), arms, metrics, rows)


def _values(
    arm: str, outcome: Outcome[CellMetrics], metrics: Sequence[Metric]
) -> list[tuple[tuple[str, str], Value]]:
    """Values of a line; of a cell that ended badly only how, once."""
    if outcome.status:
        return [((arm, metrics[0].key), Value(outcome.status))]
    return [((arm, metric.key), _value(outcome, metric)) for metric in metrics]


def _value(outcome: Outcome[CellMetrics], metric: Metric) -> Value:
    ok, total = request_counts(outcome)
    if metric.key == "requests":
        return Value(f"{ok}/{total}")
    if metric.key == "cancelled":
        return Value(str(cancelled(outcome)))
    if metric.key == "prompt_tokens":
        return Value(_prompt_range(outcome))
    number = outcome.median(metric.key)
    if number is None:
        return Value("")
    # No time between tokens is none that was measured: their chunks shared a read.
    fair = _whole(outcome) and number > 0
    return Value(f"{number:.3f}", number if fair else None)


def request_counts(outcome: Outcome[CellMetrics]) -> tuple[int, int]:
    """Complete and all measured requests, summed over repeats."""
    runs = outcome.metrics.values()
    return sum(m.ok for m in runs), sum(m.total for m in runs)


def cancelled(outcome: Outcome[CellMetrics]) -> int:
    """Measured requests that the client cancelled as the load asks, summed over repeats."""
    return sum(m.cancelled for m in outcome.metrics.values())


def failed_requests(outcome: Outcome[CellMetrics]) -> int:
    """Measured requests that are neither complete nor cancelled, summed over repeats."""
    ok, total = request_counts(outcome)
    return total - ok - cancelled(outcome)


def _whole(outcome: Outcome[CellMetrics]) -> bool:
    return failed_requests(outcome) == 0


def _prompt_range(outcome: Outcome[CellMetrics]) -> str:
    runs = [m for m in outcome.metrics.values() if m.prompt_tokens_min is not None]
    if not runs:
        return ""
    low = min(m.prompt_tokens_min or 0 for m in runs)
    return f"{low}-{max(m.prompt_tokens_max or 0 for m in runs)}"
