"""A sweep beside a published run: same columns, ratio beside, only where cells coincide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal

from sweeps.a2a_metrics import A2aMetrics
from sweeps.compare import (
    ArmMatch,
    match_arm,
    overlap,
    published_cells,
    published_shapes,
    same_all_to_all,
    unmatched_arms,
    words,
)
from sweeps.published import data
from sweeps.report_serving import sorted_cells
from sweeps.results import Outcome, Trial, labels
from sweeps.stats import median
from sweeps.tablefmt import Block, Metric, Section, Value, stacked, text_table
from sweeps.view import ServingGrid, View

# (ours, theirs, heading)
_METRICS = (
    ("ttft_p50_ms", "ttft_p50_ms", "TTFT p50 ms"),
    ("ttft_p95_ms", "ttft_p95_ms", "TTFT p95 ms"),
    ("tpot_p50_ms", "tpot_p50_ms", "TPOT p50 ms"),
    ("chunk_gap_p99_ms", "itl_p99_ms", "ITL p99 ms"),
    ("output_tokens_per_s", "output_tok_per_s", "tok/s"),
    ("requests_per_s", "requests_per_s", "requests/s"),
)
_SIDES = ("here", "published", "here / published")
_WARNING = (
    "Cells coincide in the workload and the arm, and in nothing else: model, hardware, software "
    "and the placement of ranks may differ, so a ratio here is no verdict on either run."
)


def external_dp(view: View) -> Section:
    """Serving cells beside the published comparison of wide TP with External DP."""
    found = view.of("serving")
    matches = [match_arm(a, [t for t in found if t.label == a]) for a in labels(found)]
    blocks: list[Block] = [_WARNING]
    for match in matches:
        blocks += _arm_blocks(match, view.serving, found)
    missing = unmatched_arms(matches)
    blocks.append(f"Published arms that were not run here: {', '.join(missing) or 'none'}.")
    return Section("Beside the published serving run (external_dp)", tuple(blocks))


def _arm_blocks(match: ArmMatch, grid: ServingGrid, found: list[Trial]) -> list[Block]:
    if match.published is None:
        return [f"{match.label}: not compared, {match.why_not}."]
    theirs = published_cells(data.external_dp(), match.published)
    shapes = published_shapes(key.shape for key, o in grid.items() if match.label in o)
    cells = [
        ((shapes[key.shape], key.concurrency), o[match.label])
        for key, o in sorted_cells(grid)
        if match.label in o and key.rate_per_s is None  # no published cell was an open loop
    ]
    ours = {key: outcome for key, outcome in cells if outcome.metrics}
    failed = [key for key, outcome in cells if not outcome.metrics]
    shared = overlap(ours, theirs)
    metrics = [Metric(key, heading) for key, _, heading in _METRICS]
    rows = [
        (f"{shape} c{c}", _values(ours[shape, c].median, theirs[shape, c]))
        for shape, c in shared.both
    ]
    title = f"{match.label} beside {match.published}{_proof(match.label, found)}"
    sentence = (
        f"{match.label}: only here: {words(shared.only_here)}. "
        f"Only published: {words(shared.only_published)}. "
        f"Run here without a result: {words(failed)}."
    )
    if not rows:
        return [f"{match.label}: no cell coincides with {match.published}.", sentence]
    return [stacked(title, ("cell", ""), _SIDES, metrics, rows), sentence]


def _proof(label: str, found: list[Trial]) -> str:
    states = {t.transport_status for t in found if t.label == label}
    return " (transport here unproved)" if "unproved" in states else ""


def _values(
    ours: Callable[[str], float | None], row: data.ServingRow
) -> dict[tuple[str, str], Value]:
    values: dict[tuple[str, str], Value] = {}
    for key, column, _ in _METRICS:
        here, published = ours(key), getattr(row, column)
        if here is not None:
            values["here", key] = Value(f"{here:.3f}")
        if published is not None:
            values["published", key] = Value(str(published))
        if here is not None and published is not None:
            values["here / published", key] = Value(f"{here / float(published):.2f}")
    return values


def pplx_garden(view: View) -> Section:
    """All-to-all cells beside the published medians, with our p50 pooled over ranks."""
    title = "Beside the published all-to-all run (pplx_garden)"
    rows: list[tuple[object, ...]] = []
    alone: list[tuple[str, int]] = []
    for (_, ep), arms in view.a2a.items():
        for label, outcome in arms.items():
            matched = _all_to_all_rows(outcome)
            rows += matched
            if not matched and not outcome.status:
                trial = outcome.trials[0]
                alone.append((f"{label} {trial.phase} {trial.routing}", ep))
    columns = ("workload", "op", "EP", "backend", "fabric", "how", "provenance", *_SIDES)
    table = text_table("p50 pooled over ranks and iterations, µs", columns, rows)
    published = sum(row.status == "ok" for row in data.pplx_garden())
    sentence = (
        "A cell coincides in phase, tokens, EP size, backend and fabric (efa; cx7 is ib here), "
        "and has uniform routing. "
        f"Only here: {words(alone, 'EP')}. "
        f"Published values beside which nothing stands here: {published - _used(rows)} of "
        f"{published}."
    )
    return Section(title, (_WARNING, table, sentence) if rows else (sentence,))


def _used(rows: Sequence[tuple[object, ...]]) -> int:
    return len({(*row[:5], row[6]) for row in rows if isinstance(row[8], Decimal)})


def _all_to_all_rows(outcome: Outcome[A2aMetrics]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for row in data.pplx_garden():
        here = _pooled_p50(outcome, row.phase)
        if here is None or not same_all_to_all(row, outcome.trials[0]):
            continue
        theirs = row.median_us
        ratio = "" if theirs is None else f"{here / float(theirs):.2f}"
        trial = outcome.trials[0]
        mode = ", ".join(trial.unusual)
        name = (row.workload, row.phase, f"EP{row.ep_size}", row.backend, row.transport, mode)
        rows.append((*name, row.provenance, f"{here:.1f}", theirs or row.status, ratio))
    return rows


def _pooled_p50(outcome: Outcome[A2aMetrics], op: str) -> float | None:
    runs = [m.ops[op].p50_us for m in outcome.metrics.values() if op in m.ops]
    return median([p50 for p50 in runs if p50 is not None])


COMPARISONS: dict[str, Callable[[View], Section]] = {
    "external_dp": external_dp,
    "pplx_garden": pplx_garden,
}
