"""Serving tables of a sweep: arms side by side, and ratios of the first arm to the others."""

from __future__ import annotations

from collections.abc import Sequence

from serving.load.metrics import CellMetrics
from sweeps.report_ratio import ratio_table
from sweeps.results import Outcome, labels
from sweeps.tablefmt import Metric, Section, Table, Value, side_by_side
from sweeps.view import ServingGrid, ServingKey, View

LATENCY = (
    Metric("ttft_p50_ms", "TTFT p50 ms", lower_is_better=True),
    Metric("ttft_p95_ms", "TTFT p95 ms", lower_is_better=True),
    Metric("tpot_p50_ms", "TPOT p50 ms", lower_is_better=True),
    Metric("chunk_gap_p99_ms", "chunk gap p99 ms", lower_is_better=True),
    Metric("output_tokens_per_s", "tok/s", lower_is_better=False),
)
_MORE = (
    Metric("requests", "ok/total"),
    Metric("prompt_tokens", "prompt tokens"),
    Metric("requests_per_s", "requests/s", lower_is_better=False),
    Metric("steady_tokens_per_s", "steady tok/s", lower_is_better=False),
    Metric("ttft_p99_ms", "TTFT p99 ms", lower_is_better=True),
    Metric("itl_p50_ms", "ITL p50 ms", lower_is_better=True),
    Metric("itl_p99_ms", "ITL p99 ms", lower_is_better=True),
    Metric("e2e_p50_ms", "latency p50 ms", lower_is_better=True),
)
_EQUAL_BATCH = (
    "Each engine admits at most its own `max_num_seqs`: one engine (wide TP) and several (External "
    "DP) differ in admission as well as in layout once the concurrency passes the smaller limit. "
    "Only an arm with an equal total batch tells the two apart."
)


def sections(view: View) -> list[Section]:
    """The serving tables, or nothing when the sweep did not serve."""
    grid = view.serving
    if not grid:
        return []
    arms = labels(view.of("serving"))
    shapes = list(dict.fromkeys(shape for shape, _ in grid))
    blocks: list[Table | str] = [_runs_sentence(grid)]
    for shape in shapes:
        blocks.append(_table(f"{shape} tokens", grid, shape, arms, LATENCY))
        blocks.append(_table(f"{shape} tokens, requests and more", grid, shape, arms, _MORE))
    if len({(t.tp, t.dp) for t in view.of("serving")}) > 1:
        blocks.append(_EQUAL_BATCH)
    found = [Section("Serving", tuple(blocks))]
    if len(arms) > 1:
        rows = {f"{shape} c{c}": outcomes for (shape, c), outcomes in sorted_cells(grid)}
        found.append(ratio_table("Serving ratios", arms, LATENCY, rows, _whole))
    return found


def sorted_cells(grid: ServingGrid) -> list[tuple[ServingKey, dict[str, Outcome[CellMetrics]]]]:
    """Cells by shape in the order of the sweep, then by concurrency."""
    shapes = list(dict.fromkeys(shape for shape, _ in grid))
    return sorted(grid.items(), key=lambda item: (shapes.index(item[0][0]), item[0][1]))


def _runs_sentence(grid: ServingGrid) -> str:
    repeats = {len(o.metrics) for outcomes in grid.values() for o in outcomes.values()} - {0}
    marked = "Marked: the better value of a row; an arm with failed requests does not compete."
    if not repeats or max(repeats) == 1:
        return f"One run of each cell. {marked}"
    shown = f"{min(repeats)} to {max(repeats)}" if len(repeats) > 1 else f"{max(repeats)}"
    return f"Medians over {shown} repeats of each cell; requests are summed over them. {marked}"


def _table(
    title: str, grid: ServingGrid, shape: str, arms: Sequence[str], metrics: Sequence[Metric]
) -> Table:
    rows = [
        (str(c), {(arm, m.key): _value(o, m) for arm, o in outcomes.items() for m in metrics})
        for (at, c), outcomes in sorted_cells(grid)
        if at == shape
    ]
    return side_by_side(title, "concurrency", arms, metrics, rows)


def _value(outcome: Outcome[CellMetrics], metric: Metric) -> Value:
    if outcome.status:
        return Value(outcome.status)
    ok, total = request_counts(outcome)
    if metric.key == "requests":
        return Value(f"{ok}/{total}")
    if metric.key == "prompt_tokens":
        return Value(_prompt_range(outcome))
    number = outcome.median(metric.key)
    if number is None:
        return Value("")
    return Value(f"{number:.3f}", number if _whole(outcome) else None)


def request_counts(outcome: Outcome[CellMetrics]) -> tuple[int, int]:
    """Complete and all measured requests, summed over repeats."""
    runs = outcome.metrics.values()
    return sum(m.ok for m in runs), sum(m.total for m in runs)


def _whole(outcome: Outcome[CellMetrics]) -> bool:
    ok, total = request_counts(outcome)
    return ok == total


def _prompt_range(outcome: Outcome[CellMetrics]) -> str:
    runs = [m for m in outcome.metrics.values() if m.prompt_tokens_min is not None]
    if not runs:
        return ""
    low = min(m.prompt_tokens_min or 0 for m in runs)
    return f"{low}-{max(m.prompt_tokens_max or 0 for m in runs)}"
