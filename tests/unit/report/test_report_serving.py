"""Reports of synthetic serving results against values worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweeps.read import load
from sweeps.render_markdown import markdown
from sweeps.report import brief, build, of_results
from sweeps.tablefmt import Section, Table, Verbatim
from sweeps.view import view

SECOND = 1_000_000_000


def sections_of(folder: Path, published: str | None = None) -> dict[str, Section]:
    return {s.title: s for s in build(view(load(folder)), published)}


def tables_of(section: Section) -> dict[str, Table]:
    return {b.title: b for b in section.blocks if isinstance(b, Table)}


def row_of(table: Table, *labels: str) -> dict[str, tuple[str, bool]]:
    """Cells of the row that starts with these labels, by heading: (text, marked)."""
    (row,) = [r for r in table.rows if tuple(c.text for c in r[: len(labels)]) == labels]
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
    one = row_of(tables["1024/256 tokens"], "c1", "wide_tp")
    # TTFT 100 and 200; TPOT 30/3 and 30/1; gaps 10 20 30; 6 tokens in half a second.
    assert one["TTFT p50 ms"] == ("150.000", False)
    assert one["TTFT p95 ms"] == ("195.000", False)
    assert one["TPOT p50 ms"] == ("20.000", False)
    assert one["chunk gap p99 ms"] == ("29.800", False)
    assert one["tok/s"] == ("12.000", False)
    assert one["ok/total"] == ("2/2", False)
    more = row_of(tables["1024/256 tokens, more"], "c1", "wide_tp")
    assert more["prompt tokens"] == ("1024-1026", False)
    assert more["ITL p50 ms"][0] == "10.000"  # 10 10 10 30
    assert more["ITL p99 ms"][0] == "29.400"
    assert more["requests/s"][0] == "4.000"


@pytest.fixture
def two_arms(results: Any, tmp_path: Path) -> dict[str, Section]:
    fill_two_arms(results)
    return sections_of(results.write(tmp_path))


def test_an_arm_with_failed_requests_is_shown_and_nothing_is_marked_against_it(
    two_arms: dict[str, Section],
) -> None:
    tables = tables_of(two_arms["Serving"])
    one = row_of(tables["1024/256 tokens"], "c1", "external_dp over ib")
    assert one["TTFT p50 ms"] == ("50.000", False)
    assert one["ok/total"] == ("1/2", False)
    (failed,) = tables_of(two_arms["Failed requests"]).values()
    line = ["external_dp over ib", "1024/256 c1", "measured", "failed"]
    assert texts(failed) == [[*line, "stream ended without [DONE]", "1"]]


def test_failed_trials_stand_in_the_tables_and_with_their_reasons(
    two_arms: dict[str, Section],
) -> None:
    table = tables_of(two_arms["Serving"])["1024/256 tokens"]
    four = [row for row in texts(table) if row[0] == "c4"]
    assert four == [
        ["c4", "wide_tp", "timeout", *[""] * 5],
        ["c4", "external_dp over ib", "crash", *[""] * 5],
    ]
    failed = [b for b in two_arms["Failed trials"].blocks if isinstance(b, Verbatim)]
    assert [(block.title, block.text) for block in failed] == [
        ("wide_tp: timeout in 1024/256 c4", "no token within 900 s"),
        ("external_dp over ib: crash in 1024/256 c4", "rank 2 died: exit code -9"),
    ]
    assert "2 FAILED, 1 requests FAILED" in str(two_arms[""].blocks)


def test_an_arm_that_did_not_run_a_cell_has_no_line_there(two_arms: dict[str, Section]) -> None:
    table = tables_of(two_arms["Serving"])["1024/256 tokens"]
    assert row_of(table, "c8")["arm"] == ("wide_tp", False)
    assert row_of(table, "c8")["TTFT p50 ms"] == ("10.000", False)


def test_ratios_stand_only_where_both_arms_have_the_cell(two_arms: dict[str, Section]) -> None:
    (ratios,) = tables_of(two_arms["Serving ratios"]).values()
    assert ratios.title == "wide_tp / external_dp over ib"
    assert row_of(ratios, "1024/256 c1")["TTFT p50 ms"] == ("3.00", False)
    assert row_of(ratios, "1024/256 c1")["tok/s"] == ("4.00", False)
    assert [row[0] for row in texts(ratios)] == ["1024/256 c1"]
    assert "One run" in str(two_arms["Serving ratios"].blocks[0])


def test_the_published_run_stands_beside_where_cells_coincide(results: Any, tmp_path: Path) -> None:
    fill_two_arms(results)
    section = sections_of(results.write(tmp_path), "external_dp")[
        "Beside the published serving run (external_dp)"
    ]
    tables = tables_of(section)
    wide = tables["wide_tp beside wide_tp"]
    sides = ("here", "published", "here / published")
    ttft = [row_of(wide, "1024/256 c1", side)["TTFT p50 ms"][0] for side in sides]
    assert ttft == ["150.000", "58.302", "2.57"]
    rdma = tables["external_dp over ib beside external_dp_rdma"]
    tpot = [row_of(rdma, "1024/256 c1", side)["TPOT p50 ms"][0] for side in sides]
    assert tpot == ["10.000", "", ""]
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


def test_cancelled_requests_have_a_column_and_are_no_failures(results: Any, tmp_path: Path) -> None:
    cell: dict[str, Any] = {"shape": "32/16", "concurrency": 1, "requests": 2}
    cancelled = {"state": "aborted", "reason": "cancelled by the client"}
    for arm, ttft in (("wide_tp", 10), ("external_dp", 30)):
        results.trial(arm, arm=arm, cancel_share=0.5, cancel_after_tokens=8, **cell)
        kept = results.request(0, [ttft, 40], [1, 1])
        given_up = results.request(0, [1, 2], [4, 4], **cancelled)
        results.serving(arm, [kept, given_up], wall_ns=SECOND)
    results.trial("without", **cell)
    results.serving("without", [results.request(0, [20, 50], [1, 1])], wall_ns=SECOND)
    swept = view(load(results.write(tmp_path)))
    sections = {s.title: s for s in build(swept)}
    tables = tables_of(sections["Serving"])
    one = row_of(tables["32/16 with 50 % cancelled after 8 tokens"], "c1", "wide_tp")
    assert (one["ok/total"], one["cancelled"]) == (("1/2", False), ("1", False))
    assert (one["TTFT p50 ms"], one["tok/s"]) == (("10.000", True), ("2.000", False))
    without = row_of(tables["32/16 tokens"], "c1", "wide_tp")
    assert without["TTFT p50 ms"] == ("20.000", False)
    assert "cancelled" not in without
    assert "Failed requests" not in sections
    assert "no request failed, no flags" in str(sections[""].blocks)
    (table,) = tables_of({s.title: s for s in brief(swept)}["Serving"]).values()
    assert table.columns[:4] == ("cell", "arm", "ok/total", "cancelled")


def test_several_load_clients_are_named_and_no_more_of_them_advised(
    results: Any, tmp_path: Path
) -> None:
    for clients, shape in ((None, "8/1"), (1, "8/2"), (3, "8/3")):
        trial = f"t{clients}"
        results.trial(trial, shape=shape, cell=shape, concurrency=1, requests=1, clients=clients)
        late = {"client_lag_flag": True, "client_lag_p99_ns": 2_000_000}
        request = results.request(0, [10, 20], [1, 1])
        results.serving(trial, [request], wall_ns=SECOND, in_flight_max=1, **late)
    sections = sections_of(results.write(tmp_path))
    assert "vllm 0.30.0, load from 3 client processes." in str(sections[""].blocks)
    (flags,) = tables_of(sections["Flags"]).values()
    assert [row[1:] for row in texts(flags)] == [
        ["client late (p99); load.clients=2 may help", "8/1: 2.000 ms; 8/2: 2.000 ms"],
        ["client late (p99)", "8/3: 2.000 ms"],
    ]


def test_repeats_give_medians_and_an_interval(results: Any, tmp_path: Path) -> None:
    for repeat, (ours, theirs) in enumerate([(100, 200), (110, 200), (300, 400)]):
        for arm, ttft in (("wide_tp", ours), ("external_dp_tcp", theirs)):
            trial = f"{arm}-{repeat}"
            cell = {"shape": "32/16", "concurrency": 1, "requests": 1, "repeat": repeat}
            results.trial(trial, arm=arm, transport_asked="tcp", **cell)
            requests = [results.request(0, [ttft, ttft + 10], [1, 1])]
            results.serving(trial, requests, wall_ns=SECOND)
    sections = sections_of(results.write(tmp_path))
    table = tables_of(sections["Serving"])["32/16 tokens"]
    assert row_of(table, "c1", "wide_tp over tcp")["TTFT p50 ms"] == ("110.000", True)
    assert row_of(table, "c1", "external_dp_tcp")["TTFT p50 ms"] == ("200.000", False)
    (ratios,) = tables_of(sections["Serving ratios"]).values()
    # 0.50, 0.55 and 0.75: the median of paired ratios, and the range that three repeats can show.
    assert row_of(ratios, "32/16 c1")["TTFT p50 ms"] == ("0.55 (0.50-0.75) ≠ 1", True)
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
    one = row_of(tables_of(sections["Serving"])["32/16 tokens"], "c1", "wide_tp")
    assert one["TTFT p50 ms"][0] == "10.000"
    assert "Failed trials" not in sections


def test_the_markdown_has_bold_for_the_better_value_and_escapes_text(
    results: Any, tmp_path: Path
) -> None:
    fill_two_arms(results)
    results.trial("x", arm="wide_tp", status="failed", error="a|b <c>\nd", shape="9/9", cell="9/9")
    for trial, arm, at in (("a", "wide_tp", 10), ("b", "external_dp_tcp", 30)):
        results.trial(trial, arm=arm, shape="32/16", concurrency=1, requests=1)
        results.serving(trial, [results.request(0, [at, 20 + at], [1, 1])], wall_ns=SECOND)
    results.rows["requests"][0] |= {"state": "failed", "reason": "a|b <c>\nd"}
    report = of_results(results.write(tmp_path))
    text = markdown(report.title, report.full)
    assert "| **10.000** |" in text
    assert "| 30.000 |" in text
    assert "a\\|b &lt;c><br>d" in text
    assert "```text\na|b <c>\nd\n```" in text
    rows = [line for line in text.splitlines() if line.startswith("| c1 |")]
    assert rows
    heads = {line.count("|") for line in text.splitlines() if line.startswith("| cell | arm")}
    assert {row.count("|") for row in rows} <= heads


def _layout(kind: str, dp: int) -> str:
    return json.dumps({"arm": {"arm": {"kind": kind, "dp": dp, "max_num_seqs": 16}}})


@pytest.mark.parametrize(("concurrency", "remarked"), [(16, False), (32, True)])
def test_unequal_batches_are_remarked_only_above_the_smaller_limit(
    results: Any, tmp_path: Path, concurrency: int, remarked: bool
) -> None:
    for arm, dp in (("wide_tp", 1), ("external_dp", 4)):
        cell = {"shape": "32/16", "concurrency": concurrency, "requests": 1}
        results.trial(arm, arm=arm, config_json=_layout(arm, dp), **cell)
        results.serving(arm, [results.request(0, [10, 20], [1, 1])], wall_ns=SECOND)
    report = of_results(results.write(tmp_path))
    for sections in (report.brief, report.full):
        (serving,) = [s for s in sections if s.title == "Serving"]
        assert ("wide_tp 16, external_dp 64. Above c = 16" in str(serving.blocks)) is remarked


@pytest.mark.parametrize(
    ("dp", "ep", "concurrency", "remarked"),
    [(4, 4, 1, True), (4, 4, 6, True), (4, 4, 8, False), (4, None, 1, False), (1, 4, 1, False)],
)
def test_ranks_in_lockstep_are_remarked_where_they_cannot_be_equally_busy(
    results: Any, tmp_path: Path, dp: int, ep: int | None, concurrency: int, remarked: bool
) -> None:
    cell = {"shape": "32/16", "concurrency": concurrency, "requests": 1}
    results.trial("x", arm="external_dp", dp=dp, ep=ep, **cell)
    results.serving("x", [results.request(0, [10, 20], [1, 1])], wall_ns=SECOND)
    report = of_results(results.write(tmp_path))
    said = f"waiting: external_dp (DP {dp}) at c = {concurrency}."
    for sections in (report.brief, report.full):
        (serving,) = [s for s in sections if s.title == "Serving"]
        assert (said in str(serving.blocks)) is remarked


def test_the_brief_report_has_the_published_columns_of_all_shapes_in_one_table(
    results: Any, tmp_path: Path
) -> None:
    fill_two_arms(results)
    serving = {s.title: s for s in brief(view(load(results.write(tmp_path))))}["Serving"]
    (table,) = tables_of(serving).values()
    assert table.columns == (
        *("cell", "arm", "ok/total", "TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms"),
        *("chunk gap p99 ms", "tok/s"),
    )
    assert [(row[0], row[1], row[2]) for row in texts(table)] == [
        ("1024/256 c1", "wide_tp", "2/2"),
        ("1024/256 c1", "external_dp over ib", "1/2"),
        ("1024/256 c4", "wide_tp", "timeout"),
        ("1024/256 c4", "external_dp over ib", "crash"),
        ("1024/256 c8", "wide_tp", "1/1"),
    ]


def test_a_gap_of_no_time_is_shown_and_not_called_better(results: Any, tmp_path: Path) -> None:
    for arm, second in (("wide_tp", 10), ("external_dp", 30)):
        results.trial(arm, arm=arm, shape="32/16", concurrency=1, requests=1)
        results.serving(arm, [results.request(0, [10, second], [1, 1])], wall_ns=SECOND)
    tables = tables_of(sections_of(results.write(tmp_path))["Serving"])
    table = tables["32/16 tokens, more"]
    assert row_of(table, "c1", "wide_tp")["ITL p50 ms"] == ("0.000", False)
    assert row_of(table, "c1", "external_dp")["ITL p50 ms"] == ("20.000", False)


def test_one_reason_stands_once_for_all_cells_that_it_took(results: Any, tmp_path: Path) -> None:
    reason = "rank 0 gave no token"
    for number, error in enumerate([reason, f"the arm is down: {reason}", "another"]):
        cell = {"cell": f"c{number}", "shape": "32/16", "concurrency": number + 1}
        results.trial(f"t{number}", status="crash", error=error, **cell)
    sections = sections_of(results.write(tmp_path))
    failed = [b for b in sections["Failed trials"].blocks if isinstance(b, Verbatim)]
    assert [(block.title, block.text) for block in failed] == [
        ("wide_tp: crash in c0; c1", reason),
        ("wide_tp: crash in c2", "another"),
    ]


def test_restart_of_a_group_is_shown_once_for_each_reason(results: Any, tmp_path: Path) -> None:
    reason = "rank0 found its port taken: OSError: [Errno 98] Address already in use"
    cell: dict[str, Any] = {"shape": "1024/256", "requests": 2}
    results.trial("w", concurrency=1, **cell)
    for trial_id, concurrency in (("e1", 1), ("e2", 4)):
        results.trial(
            trial_id, arm="external_dp", concurrency=concurrency, restarted_for=reason, **cell
        )
    folder = results.write(tmp_path / "restarted")
    swept = view(load(folder))
    for found in (build(swept), brief(swept)):
        (restarts,) = [section for section in found if section.title == "Restarts"]
        assert texts(tables_of(restarts)[""]) == [["external_dp", reason]]


def test_groups_that_started_once_have_no_restarts(results: Any, tmp_path: Path) -> None:
    fill_two_arms(results)
    assert "Restarts" not in sections_of(results.write(tmp_path / "once"))
