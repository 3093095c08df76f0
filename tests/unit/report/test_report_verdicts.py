"""Verdicts on two arms: their words, and what keeps them from being given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sweeps.read import load
from sweeps.report import build
from sweeps.tablefmt import Table
from sweeps.verdict import ratio_span
from sweeps.view import view

SECOND = 1_000_000_000
TOO_FEW = "too few repeats for a verdict ({}; 6 needed)"


def fill(results: Any, arm: str, ttft_ms: Sequence[float], **trial: Any) -> None:
    """One cell of an arm, a repeat for each TTFT: two tokens 10 ms apart, in a second."""
    request: dict[str, Any] = trial.pop("request", {})
    cell: dict[str, Any] = {"shape": "1024/256", "concurrency": 1, "requests": 1, **trial}
    load = {"file": "talks.json", "shared_prefix_tokens": 8}
    cell["config_json"] = json.dumps({"arm": {"load": load}})
    for repeat, ttft in enumerate(ttft_ms):
        name = f"{arm}-{trial}-{repeat}"
        results.trial(name, arm=arm, repeat=repeat, **cell)
        sent = results.request(0, [ttft, ttft + 10], [1, 1], **request)
        results.serving(name, [sent], wall_ns=SECOND)


def lines(results: Any, folder: Path) -> list[list[str]]:
    """Rows of the table of verdicts, of which there is one."""
    sections = build(view(load(results.write(folder))))
    (found,) = [section for section in sections if section.title == "Serving verdicts"]
    (table,) = [block for block in found.blocks if isinstance(block, Table)]
    return [[cell.text for cell in row] for row in table.rows]


def test_six_pairs_that_agree_give_a_verdict_in_words(results: Any, tmp_path: Path) -> None:
    fill(results, "external_dp", [100 + r for r in range(6)], transport_asked="ib")
    fill(results, "external_dp", [400] * 6, transport_asked="tcp")
    assert lines(results, tmp_path) == [
        ["1024/256 c1", "tok/s (higher is better)", "no difference shown (1.00 to 1.00)"],
        [
            "1024/256 c1",
            "TTFT p50 (lower is better)",
            "external_dp over ib 0.25 to 0.26 × external_dp over tcp: better",
        ],
        ["1024/256 c1", "TPOT p50 (lower is better)", "no difference shown (1.00 to 1.00)"],
    ]


def test_the_first_arm_can_be_the_worse_one(results: Any, tmp_path: Path) -> None:
    fill(results, "external_dp", [400] * 6, transport_asked="tcp")
    fill(results, "wide_tp", [100, 101, 102, 103, 104, 111])
    verdict = lines(results, tmp_path)[1][2]
    assert verdict == "external_dp over tcp 3.7 to 4.0 × wide_tp: worse"


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_below_six_pairs_there_is_no_verdict_however_large_the_difference(
    results: Any, tmp_path: Path, repeats: int
) -> None:
    fill(results, "external_dp", [100] * 6)
    fill(results, "wide_tp", [400] * repeats)
    metrics = "tok/s, TTFT p50, TPOT p50"
    assert lines(results, tmp_path) == [["1024/256 c1", metrics, TOO_FEW.format(repeats)]]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        (
            [0.8, 1.1, 1.1, 1.2, 1.3, 1.3, 1.4],
            "no difference shown (1.10 to 1.30, but sign-flip p = 0.09)",
        ),
        ([1.05, 1.1, 1.1, 1.2, 1.3, 1.3, 1.4], "external_dp 1.10 to 1.30 × wide_tp: worse"),
    ],
)
def test_an_interval_without_one_is_no_verdict_where_pairs_disagree(
    results: Any, tmp_path: Path, ratios: list[float], verdict: str
) -> None:
    fill(results, "external_dp", [100 * ratio for ratio in ratios])
    fill(results, "wide_tp", [100] * len(ratios))
    assert lines(results, tmp_path)[1][2] == verdict


def test_a_failed_arm_and_failed_requests_are_named(results: Any, tmp_path: Path) -> None:
    fill(results, "external_dp", [100] * 6)
    fill(results, "wide_tp", [400] * 6, request={"state": "failed", "reason": "no end marker"})
    four: dict[str, Any] = {"shape": "1024/256", "concurrency": 4}
    fill(results, "external_dp", [100] * 6, concurrency=4)
    results.trial("w4", status="timeout", error="no token within 900 s", **four)
    metrics = "tok/s, TTFT p50, TPOT p50"
    assert lines(results, tmp_path) == [
        ["1024/256 c1", metrics, "no verdict: 6 of 6 requests of wide_tp did not complete"],
        ["1024/256 c4", metrics, "no verdict: wide_tp has no result (timeout)"],
    ]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"shared_gpu": True}, "ranks of wide_tp shared a GPU"),
        (
            {
                "transport_asked": "ib",
                "transport_seen": "tcp",
                "transport_status": "contradicted",
            },
            "wide_tp over ib asked for ib, but tcp was seen",
        ),
        ({"arrival": "gamma"}, "arrivals differ (closed; gamma)"),
        ({"requests": 2}, "numbers of requests differ (1; 2)"),
    ],
)
def test_what_is_not_comparable_has_no_verdict(
    results: Any, tmp_path: Path, other: dict[str, Any], why: str
) -> None:
    fill(results, "external_dp", [100] * 6)
    fill(results, "wide_tp", [400] * 6, **other)
    metrics = "tok/s, TTFT p50, TPOT p50"
    assert lines(results, tmp_path) == [["1024/256 c1", metrics, f"no verdict: {why}"]]


def test_files_of_prompts_are_held_apart(results: Any, tmp_path: Path) -> None:
    talks: dict[str, Any] = {"shape": "file/16", "prompts": "conversations"}
    fill(results, "external_dp", [100] * 6, prompts_digest="aa", **talks)
    fill(results, "wide_tp", [400] * 6, prompts_digest="bb", **talks)
    why = "no verdict: files of prompts differ (SHA-256 aa; SHA-256 bb)"
    metrics = "tok/s, TTFT p50, TPOT p50"
    assert lines(results, tmp_path) == [["file/16 conversations c1", metrics, why]]


def test_a_time_of_zero_is_not_judged(results: Any, tmp_path: Path) -> None:
    fill(results, "external_dp", [100] * 6)
    fill(results, "wide_tp", [400] * 6)
    for row in results.rows["requests"][:6]:
        row["chunk_ns"] = [row["chunk_ns"][0]] * 2
    verdict = lines(results, tmp_path)[2]
    assert verdict == [
        "1024/256 c1",
        "TPOT p50",
        "no verdict: a value of 0 is none that was measured",
    ]


def test_one_arm_has_no_verdicts(results: Any, tmp_path: Path) -> None:
    fill(results, "wide_tp", [400] * 6)
    sections = build(view(load(results.write(tmp_path))))
    assert "Serving verdicts" not in {section.title for section in sections}


@pytest.mark.parametrize(
    ("low", "high", "apart", "text"),
    [
        (3.61, 4.149, True, "3.6 to 4.1"),
        (0.966, 1.044, False, "0.97 to 1.04"),
        (1.0, 1.0, False, "1.00 to 1.00"),
        (1.002, 1.31, True, "1.002 to 1.31"),
        (0.41, 0.9996, True, "0.41 to 0.9996"),
        (0.0123, 0.5, True, "0.012 to 0.50"),
    ],
)
def test_an_interval_reads_as_what_it_says(low: float, high: float, apart: bool, text: str) -> None:
    assert ratio_span(low, high, apart) == text


def test_prompts_of_text_stand_apart_from_token_ids(results: Any, tmp_path: Path) -> None:
    fill(results, "wide_tp", [400])
    fill(results, "wide_tp", [200], prompts="text")
    fill(results, "external_dp", [100], prompts="token_ids")
    swept = view(load(results.write(tmp_path)))
    assert [(f"{key.shape} {key.load}", list(arms)) for key, arms in swept.serving.items()] == [
        ("1024/256 c1", ["wide_tp", "external_dp"]),
        ("1024/256 text c1", ["wide_tp"]),
    ]


@pytest.mark.parametrize(
    ("kinds", "here", "only_here"),
    [
        (["token_ids"], "400.000", "none"),
        (["text"], "400.000", "none"),
        (["token_ids", "text"], "401.000", "1024/256 token_ids c1"),
        (["shared_prefix"], None, "1024/256 shared_prefix c1"),
    ],
)
def test_published_text_prompts_are_matched_by_text_else_by_token_ids(
    results: Any, tmp_path: Path, kinds: list[str], here: str | None, only_here: str
) -> None:
    for ttft, kind in enumerate(kinds, start=400):
        fill(results, "wide_tp", [ttft], prompts=kind)
    sections = build(view(load(results.write(tmp_path))), "external_dp")
    (found,) = [s for s in sections if s.title.startswith("Beside the published")]
    tables = [block for block in found.blocks if isinstance(block, Table)]
    assert [table.rows[0][2].text for table in tables] == ([here] if here else [])
    assert f"wide_tp: only here: {only_here}." in str(found.blocks)
