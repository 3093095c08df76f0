"""A verdict on two arms in one serving cell, from their paired repeats, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from serving.load.metrics import CellMetrics
from sweeps.report_ratio import outcome_ratio
from sweeps.report_serving import failed_requests, request_counts, sorted_cells
from sweeps.results import Outcome, Trial
from sweeps.stats import REPEATS_NEEDED, Ratio
from sweeps.tablefmt import Metric
from sweeps.view import ServingGrid, ServingKey

JUDGED = (
    Metric("output_tokens_per_s", "tok/s", lower_is_better=False),
    Metric("ttft_p50_ms", "TTFT p50", lower_is_better=True),
    Metric("tpot_p50_ms", "TPOT p50", lower_is_better=True),
)
_LARGEST_P = 0.05
# What two arms must have in common beside the cell, in words.
_LOAD: tuple[tuple[str, Callable[[Trial], str]], ...] = (
    ("prompts", lambda trial: trial.prompts or "token_ids"),
    ("files of prompts", lambda trial: f"SHA-256 {trial.prompts_digest}"),
    ("arrivals", lambda trial: trial.arrival or "closed"),
    ("numbers of requests", lambda trial: f"{trial.requests}"),
)


class Kind(Enum):
    """What a verdict says of the first arm."""

    ahead = "better"
    behind = "worse"
    no_difference = "no difference shown"
    too_few = "too few repeats"
    none = "no verdict"


@dataclass(frozen=True)
class Verdict:
    """The first arm of a sweep against another one, in one cell and one metric.

    Attributes:
        cell: Where both were measured.
        first: Label of the first arm.
        other: Label of the arm that it is divided by.
        metric: What is compared.
        kind: What the verdict is.
        words: The verdict as a report says it.
        ratio: first / other, as in the table of ratios; None where nothing may be compared.
    """

    cell: ServingKey
    first: str
    other: str
    metric: Metric
    kind: Kind
    words: str
    ratio: Ratio | None = None


def verdicts(grid: ServingGrid, arms: Sequence[str]) -> list[Verdict]:
    """The first of `arms` against each other one, pair by pair, in each cell that both have."""
    return [
        verdict
        for other in arms[1:]
        for cell, outcomes in sorted_cells(grid)
        if arms[0] in outcomes and other in outcomes
        for verdict in _of_cell(cell, (arms[0], other), outcomes[arms[0]], outcomes[other])
    ]


def _of_cell(
    cell: ServingKey, pair: tuple[str, str], a: Outcome[CellMetrics], b: Outcome[CellMetrics]
) -> Iterator[Verdict]:
    why = _incomparable(pair[0], a) or _incomparable(pair[1], b) or _unlike(a.trials, b.trials)
    for metric in JUDGED:
        if why:
            yield Verdict(cell, *pair, metric, Kind.none, f"no verdict: {why}")
            continue
        values = [*a.series(metric.key).values(), *b.series(metric.key).values()]
        if values:  # what neither arm has, such as a time per token after one, needs no line
            yield _of_metric(cell, pair, metric, outcome_ratio(a, b, metric), min(values))


def _of_metric(
    cell: ServingKey, pair: tuple[str, str], metric: Metric, ratio: Ratio | None, least: float
) -> Verdict:
    if least <= 0:
        # No time between tokens is none that was measured: their chunks shared a read.
        words = "no verdict: a value of 0 is none that was measured"
        return Verdict(cell, *pair, metric, Kind.none, words)
    if ratio is None:
        words = "no verdict: no repeat gave it in both arms"
        return Verdict(cell, *pair, metric, Kind.none, words)
    return Verdict(cell, *pair, metric, *_judged(pair, metric, ratio), ratio)


def _judged(pair: tuple[str, str], metric: Metric, ratio: Ratio) -> tuple[Kind, str]:
    if ratio.low is None or ratio.high is None or ratio.repeats < REPEATS_NEEDED:
        needed = f"({ratio.repeats}; {REPEATS_NEEDED} needed)"
        return Kind.too_few, f"too few repeats for a verdict {needed}"
    span = ratio_span(ratio.low, ratio.high, ratio.excludes_one)
    if not ratio.excludes_one:
        return Kind.no_difference, f"no difference shown ({span})"
    if ratio.p > _LARGEST_P:
        return Kind.no_difference, f"no difference shown ({span}, but sign-flip p = {ratio.p:.2f})"
    kind = Kind.ahead if is_better(ratio.value, metric) else Kind.behind
    return kind, f"{pair[0]} {span} × {pair[1]}: {kind.value}"


def is_better(ratio: float, metric: Metric) -> bool:
    """Whether a ratio says that the first arm is the better one."""
    return ratio < 1 if metric.lower_is_better else ratio > 1


def ratio_span(low: float, high: float, apart_from_one: bool) -> str:
    """`3.6 to 4.1`, `0.97 to 1.04`; with more digits where an end that is not 1 would read so."""
    return " to ".join(_shown(end, apart_from_one) for end in (low, high))


def _shown(number: float, apart_from_one: bool) -> str:
    decimals = 3 if number < 0.1 else 2 if number < 2 else 1
    while apart_from_one and decimals < 6 and float(f"{number:.{decimals}f}") == 1.0:
        decimals += 1
    return f"{number:.{decimals}f}"


def _incomparable(label: str, outcome: Outcome[CellMetrics]) -> str:
    """Why nothing is to be concluded from what an arm did in a cell; empty where it may be."""
    if outcome.status:
        return f"{label} has no result ({outcome.status})"
    if any(trial.shared_gpu for trial in outcome.trials):
        return f"ranks of {label} shared a GPU"
    for trial in outcome.trials:
        if trial.transport_status == "contradicted":
            asked, seen = trial.transport_asked, trial.transport_seen
            return f"{label} asked for {asked}, but {seen} was seen"
    lost, (_, total) = failed_requests(outcome), request_counts(outcome)
    return f"{lost} of {total} requests of {label} did not complete" if lost else ""


def _unlike(a: Sequence[Trial], b: Sequence[Trial]) -> str:
    """How the loads of two arms differ, or of their repeats; empty where they do not."""
    for what, of in _LOAD:
        kinds = dict.fromkeys(of(trial) for trial in (*a, *b))
        if len(kinds) > 1:
            return f"{what} differ ({'; '.join(kinds)})"
    return ""
