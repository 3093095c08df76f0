"""The published data: every claim follows from it, and it prints whole."""

from __future__ import annotations

import io
from dataclasses import replace
from decimal import Decimal

import pytest

from sweeps.published import claims, data, limits
from sweeps.render_markdown import markdown
from sweeps.render_text import print_report
from sweeps.report import of_published
from sweeps.report_published import all_to_all_tables, serving_tables
from sweeps.tablefmt import Table

# For each claim: (arm, shape, concurrency, column, other value) that must make it differ.
CHANGES = {
    "E1": (data.WIDE_TP, "1024/256", 64, "output_tok_per_s", "2000"),
    "E2": (data.TCP, "1024/256", 1, "output_tok_per_s", "50"),
    "E2 ": (data.TCP, "1024/256", 4, "output_tok_per_s", "100"),
    "E3": (data.TCP, "4096/128", 1, "tpot_p50_ms", "15"),
    "E4": (data.TCP, "1024/256", 1, "tpot_p50_ms", "20"),
    "E5": (data.WIDE_TP, "1024/256", 64, "ttft_p50_ms", "4000"),
    "E6": (data.WIDE_TP, "4096/128", 64, "ttft_p50_ms", "3000"),
    "E7": (data.RDMA, "1024/256", 64, "ttft_p50_ms", "300"),
    "E8": (data.RDMA, "1024/256", 64, "output_tok_per_s", "3900"),
    "E9": (data.RDMA, "4096/128", 64, "ttft_p50_ms", "360"),
    "E10": (data.RDMA, "4096/128", 64, "output_tok_per_s", "2000"),
    "E11": (data.RDMA, "1024/256", 64, "ttft_p50_ms", "300"),
    "E12": (data.RDMA, "1024/256", 64, "output_tok_per_s", "4000"),
    "E13": (data.RDMA, "4096/128", 64, "ttft_p50_ms", "360"),
    "E14": (data.RDMA, "4096/128", 64, "output_tok_per_s", "2000"),
    "E15": (data.RDMA, "1024/256", 32, "output_tok_per_s", "2700"),
    "E16": (data.RDMA, "4096/128", 4, "itl_p99_ms", "55"),
    "E17": (data.RDMA, "4096/128", 4, "requests_total", "31"),
    "E18": (data.TCP, "1024/256", 32, "ttft_p50_ms", "1400"),
    "E19": (data.RDMA, "1024/256", 8, "itl_p99_ms", "26"),
    "E20": (data.TCP, "1024/256", 8, "requests_ok", "31"),
}


def _verdicts(rows: tuple[data.ServingRow, ...]) -> dict[str, claims.Verdict]:
    return {v.id: v for v in claims.check(data.claims(), rows)}


def _changed(
    arm: str, shape: str, concurrency: int, column: str, value: str | None
) -> tuple[data.ServingRow, ...]:
    rows = data.external_dp()
    where = (arm, shape, concurrency)
    number = None if value is None else Decimal(value)
    found = tuple(
        replace(r, **{column: number}) if (r.arm, r.shape, r.concurrency) == where else r
        for r in rows
    )
    assert sum(a != b for a, b in zip(rows, found, strict=True)) == 1
    return found


def test_all_twenty_published_claims_follow_from_the_table() -> None:
    verdicts = _verdicts(data.external_dp())
    assert list(verdicts) == [f"E{n}" for n in range(1, 21)]
    assert set(claims.COMPUTE) == set(verdicts)
    assert [v.id for v in verdicts.values() if not v.equal] == []


@pytest.mark.parametrize("claim", CHANGES)
def test_a_changed_cell_makes_the_claim_differ(claim: str) -> None:
    verdict = _verdicts(_changed(*CHANGES[claim]))[claim.strip()]
    assert verdict.computed is not None or claim in ("E17", "E20")
    assert not verdict.equal


def test_a_blank_cell_gives_no_figure_instead_of_a_wrong_one() -> None:
    verdict = _verdicts(_changed(data.RDMA, "1024/256", 64, "ttft_p50_ms", None))["E7"]
    assert verdict.computed is None
    assert not verdict.equal


def test_figures_are_compared_at_the_published_digits_with_halves_away_from_zero() -> None:
    def verdict(published: str, computed: str) -> claims.Verdict:
        return claims.Verdict("E0", "", Decimal(published), Decimal(computed))

    assert verdict("6.9", "6.8998").equal
    assert verdict("2.5", "2.45").equal
    assert not verdict("2.4", "2.45").equal
    assert not verdict("2.50", "2.45").equal


def test_every_published_serving_value_stands_in_its_row_and_column() -> None:
    tables = [b for b in serving_tables(data.external_dp()) if isinstance(b, Table)]
    for row in data.external_dp():
        cells = _cells_of(tables, row.shape, f"c{row.concurrency}", row.arm)
        for heading, number in (
            ("TTFT p50 ms", row.ttft_p50_ms),
            ("TTFT p95 ms", row.ttft_p95_ms),
            ("TPOT p50 ms", row.tpot_p50_ms),
            ("ITL p99 ms", row.itl_p99_ms),
            ("tok/s", row.output_tok_per_s),
            ("requests/s", row.requests_per_s),
        ):
            assert cells[heading] == ("" if number is None else str(number))
        assert cells["ok/total"] == f"{row.requests_ok}/{row.requests_total}"
        blank = row.prompt_tokens_min is None
        expected = "" if blank else f"{row.prompt_tokens_min}-{row.prompt_tokens_max}"
        assert cells["prompt tokens"] == expected


def _cells_of(tables: list[Table], shape: str, label: str, arm: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for table in tables:
        if not table.title.startswith(shape):
            continue
        (row,) = [row for row in table.rows if (row[0].text, row[1].text) == (label, arm)]
        found |= {h: cell.text for h, cell in zip(table.columns, row, strict=True)}
    return found


def test_every_published_all_to_all_value_stands_in_its_row_and_column() -> None:
    tables = [b for b in all_to_all_tables(data.pplx_garden()) if isinstance(b, Table)]
    for row in data.pplx_garden():
        (table,) = [t for t in tables if t.title.startswith(row.workload)]
        heading = f"{row.phase}\n{row.backend} {row.transport}\n{row.provenance}"
        (line,) = [r for r in table.rows if r[0].text == f"EP{row.ep_size}"]
        text = line[table.columns.index(heading)].text
        expected = {"ok": str(row.median_us), "crash": "crash", "not_measured": ""}
        assert text == expected[row.status]


def test_the_better_published_value_of_each_row_is_marked() -> None:
    tables = [b for b in serving_tables(data.external_dp()) if isinstance(b, Table)]
    last = [r for r in tables[0].rows if r[0].text == "c64"]
    marked = {r[1].text: [c.text for c in r if c.better] for r in last}
    assert marked == {
        "wide_tp": ["6.705", "53.361"],
        "external_dp_tcp": ["4921.601"],
        "external_dp_rdma": ["297.546", "3921.562"],
    }


def test_the_printed_report_and_its_markdown_hold_every_published_number() -> None:
    report = of_published()
    printed = io.StringIO()
    print_report(report.title, report.full, printed)
    written = markdown(report.title, report.full)
    numbers = {str(r.median_us) for r in data.pplx_garden() if r.median_us is not None}
    for row in data.external_dp():
        values = (getattr(row, f) for f in row.__dataclass_fields__)
        numbers |= {str(v) for v in values if isinstance(v, Decimal)}
    assert len(numbers) > 250
    assert [n for n in numbers if n not in printed.getvalue()] == []
    assert [n for n in numbers if n not in written] == []
    assert "…" not in printed.getvalue()
    assert "20 of 20 are equal" in written


def test_sentences_that_need_blank_cells_are_listed_with_the_count() -> None:
    reasons = {e.sentence: e.reason for e in limits.serving_limits(data.external_dp())}
    tpot = "RDMA has the lower TPOT than TCP in all twelve cells"
    assert reasons[tpot] == "tpot_p50_ms of external_dp_rdma is blank in 12 of 12 cells"
    tail = "RDMA lowers the tail of TTFT (p95) in every cell"
    assert "blank in 11 of 12 cells" in reasons[tail]


def test_a_sentence_leaves_the_list_once_its_values_are_published() -> None:
    rows = [replace(row, tpot_p50_ms=Decimal(1)) for row in data.external_dp()]
    sentences = {e.sentence for e in limits.serving_limits(rows)}
    assert not [s for s in sentences if "TPOT" in s]
    assert [s for s in sentences if "(p95)" in s]


def test_what_no_common_fabric_or_row_compares_is_listed() -> None:
    reasons = {e.sentence: e.reason for e in limits.all_to_all_limits(data.pplx_garden())}
    assert "EP128 was measured in 1 of 5 columns" in reasons.values()
    assert "deepep is faster or slower than uccl_ep" in reasons
    assert "deepep is faster or slower than pplx_garden" not in reasons
    assert "how uccl_ep compares in prefill" in reasons


def test_columns_that_get_faster_with_more_ranks_are_named() -> None:
    pairs = [(str(a.median_us), str(b.median_us)) for a, b in limits.falling(data.pplx_garden())]
    assert pairs == [("834.5", "689.3"), ("5071.1", "2734.8"), ("1405.1", "1062.2")]


def test_a_malformed_published_number_is_refused_by_name() -> None:
    row = dict.fromkeys(data.AllToAllRow.__dataclass_fields__, "1") | {"tokens": "many"}
    with pytest.raises(ValueError, match="'many' is no int"):
        data._typed(data.AllToAllRow, row)
