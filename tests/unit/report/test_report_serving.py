"""Reports of synthetic serving results against values worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.read import load
from sweeps.report import build, of_results
from sweeps.tablefmt import Section, Table, markdown
from sweeps.view import view

SECOND = 1_000_000_000


def sections_of(folder: Path, published: str | None = None) -> dict[str, Section]:
    return {s.title: s for s in build(view(load(folder)), published)}


def tables_of(section: Section) -> dict[str, Table]:
    return {b.title: b for b in section.blocks if isinstance(b, Table)}


def row_of(table: Table, label: str) -> dict[str, tuple[str, bool]]:
    """Cells of the row that starts with `label`, by heading: (text, marked)."""
    (row,) = [row for row in table.rows if row[0].text == label]
    return {h: (c.text, c.better) for h, c in zip(table.columns, row, strict=True)}


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def fill_two_arms(results: Any) -> None:
    """wide_tp and External DP over ib in one cell, plus a timeout, a crash and a missing arm."""
    request = results.request
    cell: dict[str, Any] = {"shape": "1024/256", "concurrency": 1, "requests": 2}
    ib = {"arm": "external_dp", "transport_asked": "ib", "transport_seen": "ib", **cell}
    results.trial("w1", transport_asked="auto", **cell)
    results.serving(
        "w1",
        [
            request(0, [100, 110, 130], [1, 1, 2]),
            request(0, [200, 230], [1, 1], prompt_tokens=1026),
            request(0, [5000], [1], role="warmup"),
        ],
        wall_ns=SECOND // 2,
        in_flight_max=1,
    )
    results.trial("e1", **ib)
    results.serving(
        "e1",
        [
            request(1000, [1050, 1060, 1070], [1, 1, 1]),
            request(1000, [1400], [1], state="failed", reason="stream ended without [DONE]"),
        ],
        wall_ns=SECOND,
        in_flight_max=1,
    )
    at_4 = {**cell, "concurrency": 4, "cell": "1024/256 c4"}
    results.trial("w4", status="timeout", error="no token within 900 s", **at_4)
    results.trial("e4", **{**ib, **at_4, "status": "crash", "error": "rank 2 died: exit code -9"})
    results.trial("w8", **{**cell, "concurrency": 8, "cell": "1024/256 c8"})
    results.serving("w8", [request(0, [10, 20], [1, 1])], wall_ns=SECOND, in_flight_max=1)


def test_serving_tables_hold_the_metrics_of_complete_measured_requests(
    results: Any, tmp_path: Path
) -> None:
    fill_two_arms(results)
    tables = tables_of(sections_of(results.write(tmp_path))["Serving"])
    one = row_of(tables["1024/256 tokens"], "1")
    # TTFT 100 and 200; TPOT 30/3 and 30/1; gaps 10 20 30; 6 tokens in half a second.
    assert one["wide_tp\nTTFT p50 ms"] == ("150.000", False)
    assert one["wide_tp\nTTFT p95 ms"] == ("195.000", False)
    assert one["wide_tp\nTPOT p50 ms"] == ("20.000", False)
    assert one["wide_tp\nchunk gap p99 ms"] == ("29.800", False)
    assert one["wide_tp\ntok/s"] == ("12.000", False)
    more = row_of(tables["1024/256 tokens, requests and more"], "1")
    assert more["wide_tp\nok/total"] == ("2/2", False)
    assert more["wide_tp\nprompt tokens"] == ("1024-1026", False)
    assert more["wide_tp\nITL p50 ms"][0] == "10.000"  # 10 10 10 30
    assert more["wide_tp\nITL p99 ms"][0] == "29.400"
    assert more["wide_tp\nrequests/s"][0] == "4.000"


@pytest.fixture
def two_arms(results: Any, tmp_path: Path) -> dict[str, Section]:
    fill_two_arms(results)
    return sections_of(results.write(tmp_path))


def test_an_arm_with_failed_requests_is_shown_and_nothing_is_marked_against_it(
    two_arms: dict[str, Section],
) -> None:
    tables = tables_of(two_arms["Serving"])
    one = row_of(tables["1024/256 tokens"], "1")
    assert one["external_dp over ib\nTTFT p50 ms"] == ("50.000", False)
    more = row_of(tables["1024/256 tokens, requests and more"], "1")
    assert more["external_dp over ib\nok/total"] == ("1/2", False)
    (failed,) = tables_of(two_arms["Failed requests"]).values()
    line = ["external_dp over ib", "1024/256 c1, repeat 0", "measured", "failed"]
    assert texts(failed) == [[*line, "stream ended without [DONE]", "1"]]


def test_failed_trials_stand_in_the_tables_and_with_their_reasons(
    two_arms: dict[str, Section],
) -> None:
    four = row_of(tables_of(two_arms["Serving"])["1024/256 tokens"], "4")
    assert four["wide_tp\ntok/s"] == ("timeout", False)
    assert four["external_dp over ib\ntok/s"] == ("crash", False)
    (failed,) = tables_of(two_arms["Failed trials"]).values()
    reasons = [(row[0], row[2], row[3]) for row in texts(failed)]
    assert reasons == [
        ("wide_tp", "timeout", "no token within 900 s"),
        ("external_dp over ib", "crash", "rank 2 died: exit code -9"),
    ]
    assert "2 FAILED" in str(two_arms["Trials"].blocks)


def test_an_arm_that_did_not_run_a_cell_is_blank_there(two_arms: dict[str, Section]) -> None:
    eight = row_of(tables_of(two_arms["Serving"])["1024/256 tokens"], "8")
    assert eight["wide_tp\nTTFT p50 ms"] == ("10.000", False)
    assert eight["external_dp over ib\nTTFT p50 ms"] == ("", False)


def test_ratios_stand_only_where_both_arms_have_the_cell(two_arms: dict[str, Section]) -> None:
    (ratios,) = tables_of(two_arms["Serving ratios"]).values()
    assert ratios.title == "wide_tp / external_dp over ib"
    assert row_of(ratios, "1024/256 c1")["TTFT p50 ms"] == ("3.00", False)
    assert row_of(ratios, "1024/256 c1")["tok/s"] == ("4.00", False)
    assert row_of(ratios, "1024/256 c4")["tok/s"] == ("", False)
    assert "One run" in str(two_arms["Serving ratios"].blocks[0])


def test_the_published_run_stands_beside_where_cells_coincide(results: Any, tmp_path: Path) -> None:
    fill_two_arms(results)
    section = sections_of(results.write(tmp_path), "external_dp")[
        "Beside the published serving run (external_dp)"
    ]
    tables = tables_of(section)
    wide = row_of(tables["wide_tp beside wide_tp"], "1024/256 c1")
    assert wide["here\nTTFT p50 ms"][0] == "150.000"
    assert wide["published\nTTFT p50 ms"][0] == "58.302"
    assert wide["here / published\nTTFT p50 ms"][0] == "2.57"
    rdma = row_of(tables["external_dp over ib beside external_dp_rdma"], "1024/256 c1")
    assert rdma["here\nTPOT p50 ms"][0] == "10.000"
    assert rdma["published\nTPOT p50 ms"][0] == ""
    assert rdma["here / published\nTPOT p50 ms"][0] == ""
    words = " ".join(b for b in section.blocks if isinstance(b, str))
    assert "Only published: 1024/256 c4 c8 c16 c32 c64; 4096/128 c1" in words
    assert "Run here without a result: 1024/256 c4." in words
    assert "not run here: external_dp_tcp." in words


def test_an_arm_whose_transport_is_contradicted_is_not_compared(
    results: Any, tmp_path: Path
) -> None:
    results.trial(
        "e1",
        arm="external_dp",
        shape="1024/256",
        concurrency=1,
        requests=1,
        transport_asked="ib",
        transport_seen="tcp",
        transport_status="contradicted",
    )
    results.serving("e1", [results.request(0, [10, 20], [1, 1])], wall_ns=SECOND)
    sections = sections_of(results.write(tmp_path), "external_dp")
    section = sections["Beside the published serving run (external_dp)"]
    assert not tables_of(section)
    assert "external_dp over ib: not compared, asked for ib, but tcp was seen." in section.blocks
    assert "asked for transport ib, but tcp was seen" in str(sections["Flags"].blocks)


def test_repeats_give_medians_and_an_interval(results: Any, tmp_path: Path) -> None:
    for repeat, (ours, theirs) in enumerate([(100, 200), (110, 200), (300, 400)]):
        for arm, ttft in (("wide_tp", ours), ("external_dp_tcp", theirs)):
            trial = f"{arm}-{repeat}"
            cell = {"shape": "32/16", "concurrency": 1, "requests": 1, "repeat": repeat}
            results.trial(trial, arm=arm, transport_asked="tcp", **cell)
            requests = [results.request(0, [ttft, ttft + 10], [1, 1])]
            results.serving(trial, requests, wall_ns=SECOND)
    sections = sections_of(results.write(tmp_path))
    one = row_of(tables_of(sections["Serving"])["32/16 tokens"], "1")
    assert one["wide_tp over tcp\nTTFT p50 ms"] == ("110.000", True)
    assert one["external_dp_tcp\nTTFT p50 ms"] == ("200.000", False)
    (ratios,) = tables_of(sections["Serving ratios"]).values()
    # 0.50, 0.55 and 0.75: the median of paired ratios, and the range that three repeats can show.
    assert row_of(ratios, "32/16 c1")["TTFT p50 ms"] == ("0.55 (0.50-0.75, excludes 1)", True)
    assert row_of(ratios, "32/16 c1")["tok/s"] == ("1.00 (1.00-1.00)", False)
    assert "at most 75 %" in str(sections["Serving ratios"].blocks[0])


def test_only_the_last_attempt_of_a_trial_counts(results: Any, tmp_path: Path) -> None:
    cell = {"shape": "32/16", "concurrency": 1, "requests": 1}
    results.trial("w1", status="crash", error="first attempt", **cell)
    results.serving("w1", [results.request(0, [900, 901], [1, 1])], wall_ns=SECOND)
    results.trial("w1", attempt=1, **cell)
    again = results.request(0, [10, 20], [1, 1])
    results.serving("w1", [{**again, "attempt": 1}], wall_ns=SECOND, attempt=1)
    sections = sections_of(results.write(tmp_path))
    one = row_of(tables_of(sections["Serving"])["32/16 tokens"], "1")
    assert one["wide_tp\nTTFT p50 ms"][0] == "10.000"
    assert sections["Failed trials"].blocks == ("None.",)


def test_the_markdown_has_bold_for_the_better_value_and_escapes_text(
    results: Any, tmp_path: Path
) -> None:
    fill_two_arms(results)
    results.trial("x", arm="wide_tp", status="failed", error="a|b <c>\nd", shape="9/9", cell="9/9")
    for trial, arm, at in (("a", "wide_tp", 10), ("b", "external_dp_tcp", 30)):
        results.trial(trial, arm=arm, shape="32/16", concurrency=1, requests=1)
        results.serving(trial, [results.request(0, [at, 20 + at], [1, 1])], wall_ns=SECOND)
    text = markdown(*of_results(results.write(tmp_path)))
    assert "| **10.000** |" in text
    assert "| 30.000 |" in text
    assert "a\\|b &lt;c><br>d" in text
    rows = [line for line in text.splitlines() if line.startswith("| 1 |")]
    assert rows
    heads = {line.count("|") for line in text.splitlines() if line.startswith("| concurrency")}
    assert {row.count("|") for row in rows} == heads
