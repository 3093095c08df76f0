"""The published tables in their layout, the figures that follow from them, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from sweeps import plausible
from sweeps.published import claims, data, limits
from sweeps.published.data import ARMS, AllToAllRow, ServingRow
from sweeps.tablefmt import Block, Metric, Section, Table, Value, side_by_side, stacked, text_table

LATENCY_METRICS = (
    Metric("ttft_p50_ms", "TTFT p50 ms", lower_is_better=True),
    Metric("ttft_p95_ms", "TTFT p95 ms", lower_is_better=True),
    Metric("tpot_p50_ms", "TPOT p50 ms", lower_is_better=True),
    Metric("itl_p99_ms", "ITL p99 ms", lower_is_better=True),
    Metric("output_tok_per_s", "tok/s", lower_is_better=False),
)
_REQUEST_METRICS = (
    Metric("requests", "ok/total"),
    Metric("prompt_tokens", "prompt tokens"),
    Metric("requests_per_s", "requests/s", lower_is_better=False),
)


def sections() -> list[Section]:
    """Everything about the published results."""
    serving, all_to_all = data.external_dp(), data.pplx_garden()
    return [
        Section("Published serving results", tuple(serving_tables(serving))),
        Section("Published all-to-all results, median µs", tuple(all_to_all_tables(all_to_all))),
        claims_section(serving),
        _limits_section(serving, all_to_all),
        _doubts_section(serving, all_to_all),
        plausibility_section(all_to_all),
    ]


def serving_tables(rows: Sequence[ServingRow]) -> list[Block]:
    """Two tables for each shape: latencies and rate, then requests."""
    blocks: list[Block] = [
        "Marked: the best published value of a cell. A blank was not published and competes with "
        "nothing. One value per arm and cell."
    ]
    for shape in dict.fromkeys(row.shape for row in rows):
        cells = [row for row in rows if row.shape == shape]
        blocks.append(_serving_table(f"{shape} tokens", cells, LATENCY_METRICS))
        blocks.append(_serving_table(f"{shape} tokens, requests", cells, _REQUEST_METRICS))
    return blocks


def _serving_table(title: str, rows: Sequence[ServingRow], metrics: Sequence[Metric]) -> Table:
    by_concurrency: dict[int, dict[tuple[str, str], Value]] = {}
    for row in rows:
        values = by_concurrency.setdefault(row.concurrency, {})
        values.update(
            {(row.arm, metric.key): _serving_value(row, metric.key) for metric in metrics}
        )
    body = [(f"c{c}", values) for c, values in sorted(by_concurrency.items())]
    return stacked(title, ("cell", "arm"), ARMS, metrics, body)


def _serving_value(row: ServingRow, key: str) -> Value:
    if key == "requests":
        return Value(f"{row.requests_ok}/{row.requests_total}")
    if key == "prompt_tokens":
        blank = row.prompt_tokens_min is None
        return Value("" if blank else f"{row.prompt_tokens_min}-{row.prompt_tokens_max}")
    number: Decimal | None = getattr(row, key)
    return Value("") if number is None else Value(str(number), float(number))


def all_to_all_tables(rows: Sequence[AllToAllRow]) -> list[Block]:
    """One table for each workload: dispatch columns, then combine columns; rows are EP sizes."""
    blocks: list[Block] = [
        "Marked: the lowest median of a row, for dispatch and combine apart. Blank: not measured. "
        "`author_rerun` was measured again by the author of the table, `upstream` is taken over "
        "from the table of the upstream project."
    ]
    for workload in dict.fromkeys(row.workload for row in rows):
        blocks.append(_all_to_all_table([row for row in rows if row.workload == workload]))
    return blocks


def _all_to_all_table(rows: Sequence[AllToAllRow]) -> Table:
    columns = {_column(row): _column(row) for row in rows}
    phases = [Metric(p, p, lower_is_better=True) for p in dict.fromkeys(r.phase for r in rows)]
    by_ep: dict[int, dict[tuple[str, str], Value]] = {}
    for row in rows:
        by_ep.setdefault(row.ep_size, {})[_column(row), row.phase] = _all_to_all_value(row)
    body = [(f"EP{ep}", values) for ep, values in sorted(by_ep.items(), reverse=True)]
    title = f"{rows[0].workload} ({rows[0].tokens} tokens)"
    return side_by_side(title, "", columns, phases, body)


def _column(row: AllToAllRow) -> str:
    return f"{row.backend} {row.transport}\n{row.provenance}"


def _all_to_all_value(row: AllToAllRow) -> Value:
    if row.median_us is not None:
        return Value(str(row.median_us), float(row.median_us))
    return Value("" if row.status == "not_measured" else row.status)


def claims_section(rows: Sequence[ServingRow]) -> Section:
    """Each published figure beside the one that the table gives."""
    verdicts = claims.check(data.claims(), rows)
    body = [
        (v.id, v.claim, v.published, v.rounded, "equal" if v.equal else "different")
        for v in verdicts
    ]
    equal = sum(v.equal for v in verdicts)
    return Section(
        "Published figures, computed again from the table",
        (
            f"{equal} of {len(verdicts)} are equal at the published number of digits.",
            text_table("", ("id", "claim", "published", "from the data", "equal?"), body),
        ),
    )


def _limits_section(serving: Sequence[ServingRow], rows: Sequence[AllToAllRow]) -> Section:
    entries = limits.serving_limits(serving) + limits.all_to_all_limits(rows)
    body = [(entry.sentence, "not derivable", entry.reason) for entry in entries]
    return Section(
        "What the published tables cannot show",
        (text_table("", ("sentence", "", "reason"), body),),
    )


def _doubts_section(serving: Sequence[ServingRow], rows: Sequence[AllToAllRow]) -> Section:
    lengths = [
        (shape, arm, f"{low:.1f}", f"{high:.1f}")
        for (shape, arm), (low, high) in limits.tokens_per_request(serving).items()
    ]
    falls = [
        (
            f"{a.workload} {a.phase}, {a.backend} {a.transport} {a.provenance}",
            f"EP{a.ep_size}: {a.median_us}",
            f"EP{b.ep_size}: {b.median_us}",
        )
        for a, b in limits.falling(rows)
    ]
    return Section(
        "What to mind in the published values",
        (
            text_table(
                "Tokens per request (tokens/s over requests/s), over the concurrencies: fewer than "
                "the shape asks for",
                ("shape", "arm", "least", "most"),
                lengths,
            ),
            text_table("Faster at the larger EP size", ("column", "smaller", "larger"), falls),
        ),
    )


def plausibility_section(rows: Sequence[AllToAllRow]) -> Section:
    """Values of the all-to-all table that break a rule, impossible ones first."""
    found = plausible.doubts(medians(rows))
    body = [(d.severity, d.value.cell, d.value.column, d.value.median_us, d.reason) for d in found]
    bad = sum(d.severity == plausible.IMPOSSIBLE for d in found)
    setup = plausible.NOMINAL
    return Section(
        "Plausibility of the published all-to-all values",
        (
            f"{bad} values cannot be right, {len(found) - bad} further ones are to be doubted. "
            f"Bounds: {plausible.NIC_RATE / 1e9:.0f} GB/s of NIC and "
            f"{plausible.NVLINK_RATE / 1e9:.0f} GB/s of NVLink per GPU and direction, "
            f"{setup.links.node_size} GPUs per node, hidden {setup.hidden}, top-{setup.topk} of "
            f"{setup.experts} experts, uniform routing, FP8 dispatch, BF16 combine.",
            text_table("", ("severity", "cell", "column", "µs", "why"), body),
        ),
    )


def medians(rows: Sequence[AllToAllRow]) -> list[plausible.Median]:
    """The published values as the plausibility check takes them; blank cells are left out."""
    return [
        plausible.Median(
            row.workload,
            row.phase,
            row.ep_size,
            row.tokens,
            row.backend,
            row.transport,
            row.provenance,
            float(row.median_us),
        )
        for row in rows
        if row.median_us is not None
    ]
