"""Ratio tables: the first arm over each other arm, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sweeps.results import M, Outcome
from sweeps.stats import REPEATS_NEEDED, Ratio, coverage_limit, paired_ratio
from sweeps.tablefmt import Cell, Metric, Section, Table


def ratio_table(
    title: str,
    arms: Sequence[str],
    metrics: Sequence[Metric],
    rows: Mapping[str, Mapping[str, Outcome[M]]],
    whole: Callable[[Outcome[M]], bool] = lambda _: True,
) -> list[Section]:
    """The first of `arms` over each other one; marked where the first is the better one.

    Nothing where no cell has figures of two arms. `whole` says whether an outcome may be
    judged (not when some of its requests failed).
    """
    found = [_against(arms[0], other, metrics, rows, whole) for other in arms[1:]]
    tables = [table for table, _ in found if table.rows]
    repeats = {r.repeats for _, ratios in found for r in ratios}
    return [Section(title, (_explain(arms[0], repeats), *tables))] if tables else []


def _against(
    first: str,
    other: str,
    metrics: Sequence[Metric],
    rows: Mapping[str, Mapping[str, Outcome[M]]],
    whole: Callable[[Outcome[M]], bool],
) -> tuple[Table, list[Ratio]]:
    found: list[Ratio] = []
    body = []
    for label, outcomes in rows.items():
        if first not in outcomes or other not in outcomes:
            continue
        if any(t.shared_gpu for arm in (first, other) for t in outcomes[arm].trials):
            continue  # ranks on one GPU prove function, not speed
        ratios = [outcome_ratio(outcomes[first], outcomes[other], metric) for metric in metrics]
        found += [r for r in ratios if r is not None]
        fair = whole(outcomes[first]) and whole(outcomes[other])
        cells = [_cell(r, m, fair) for r, m in zip(ratios, metrics, strict=True)]
        if any(cell.text for cell in cells):
            body.append((Cell(label), *cells))
    headings = ("cell", *[metric.heading for metric in metrics])
    kept = [i for i in range(len(headings)) if any(row[i].text for row in body)]
    table = Table(
        f"{first} / {other}",
        tuple(headings[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in body),
    )
    return table, found


def outcome_ratio(a: Outcome[M], b: Outcome[M], metric: Metric) -> Ratio | None:
    """Ratio a / b of a metric over the repeats that both have; None where there is none."""
    return paired_ratio(a.series(metric.key), b.series(metric.key))


def _cell(ratio: Ratio | None, metric: Metric, whole: bool) -> Cell:
    if ratio is None:
        return Cell("")
    shown = round(ratio.value, 2)  # what reads as 1.00 is not called better
    is_better = shown < 1 if metric.lower_is_better else shown > 1
    return Cell(ratio_text(ratio), is_better and whole)


def ratio_text(ratio: Ratio) -> str:
    """`0.81`, or with repeats `0.81 (0.79-0.84) ≠ 1` where the interval excludes 1."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}"
    excludes = " ≠ 1" if ratio.excludes_one else ""
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f}){excludes}"


def _explain(first: str, repeats: set[int]) -> str:
    text = f"{first} divided by the other arm. Marked: {first} is the better one."
    if not repeats or max(repeats) == 1:
        return f"{text} One run: no difference is shown to be real."
    text += (
        " The median of the ratios of paired repeats; in brackets its bootstrap 95 % interval; "
        "≠ 1 where that excludes 1."
    )
    fewest = min(repeats - {1})
    if coverage_limit(fewest) < 0.95:
        text += (
            f" With {fewest} repeats such an interval covers at most "
            f"{100 * coverage_limit(fewest):.0f} %, whatever its name says: {REPEATS_NEEDED} are "
            "needed for 95 %."
        )
    return text
