"""Benefits and trade-offs: what is counted, in which words, and with which numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps.read import load
from sweeps.report import brief, build
from sweeps.tablefmt import Section, Table
from sweeps.view import view

SECOND = 1_000_000_000
Cells = Mapping[tuple[str, int], Sequence[float]]  # TTFT in ms of each repeat


def fill(results: Any, arm: str, cells: Cells, wall_ns: int = SECOND, **trial: Any) -> None:
    """Requests of two tokens 10 ms apart: only TTFT differs, and tok/s with `wall_ns`."""
    for (shape, concurrency), ttft_ms in cells.items():
        for repeat, ttft in enumerate(ttft_ms):
            name = f"{arm} {shape} {concurrency} {repeat} {trial}"
            cell = {"shape": shape, "concurrency": concurrency, "requests": 1, "repeat": repeat}
            results.trial(name, arm=arm, **{**cell, **trial})
            sent = results.request(0, [ttft, ttft + 10], [1, 1])
            results.serving(name, [sent], wall_ns=wall_ns)


def benefits(results: Any, folder: Path) -> Section | None:
    """The section, which both depths of a report have alike."""
    swept = view(load(results.write(folder)))
    title = "Benefits and trade-offs"
    found = [[s for s in made if s.title == title] for made in (build(swept), brief(swept))]
    assert found[0] == found[1]
    return found[0][0] if found[0] else None


def tables(results: Any, folder: Path) -> dict[str, list[tuple[str, ...]]]:
    section = benefits(results, folder)
    assert section is not None
    found = [block for block in section.blocks if isinstance(block, Table)]
    return {t.title: [tuple(cell.text for cell in row) for row in t.rows] for t in found}


def test_verdicts_are_counted_with_their_ratios_and_cells(results: Any, tmp_path: Path) -> None:
    same = [100.0] * 6
    levels = [("1024/256", c) for c in (1, 4, 8, 16, 32)]
    fill(results, "wide_tp", dict.fromkeys(levels, same), wall_ns=2 * SECOND)
    other = dict(
        zip(levels, ([250.0] * 6, [200.0] * 6, [160.0] * 6, same, [50.0] * 6), strict=True)
    )
    fill(results, "external_dp", other)
    assert tables(results, tmp_path) == {
        "wide_tp against external_dp": [
            ("benefit", "lower TTFT p50 in 3 of 5 cells (0.40 to 0.62 ×): at c ≤ 8"),
            ("trade-off", "lower tok/s in all 5 cells (0.50 ×)"),
            ("trade-off", "higher TTFT p50 in 1 of 5 cells (2.0 ×): at c = 32"),
            ("no difference shown", "TTFT p50 in 1 of 5 cells (1.00 ×): at c = 16"),
            ("no difference shown", "TPOT p50 in all 5 cells (1.00 ×)"),
        ]
    }


def test_cells_that_no_range_names_are_listed(results: Any, tmp_path: Path) -> None:
    keys = [(shape, c) for shape in ("1024/256", "4096/128") for c in (1, 4)]
    fill(results, "wide_tp", dict.fromkeys(keys, [100.0] * 6))
    other = dict(zip(keys, ([200.0] * 6, [400.0] * 6, [100.0] * 6, [50.0] * 6), strict=True))
    fill(results, "external_dp", other)
    (rows,) = tables(results, tmp_path).values()
    assert rows[:2] == [
        ("benefit", "lower TTFT p50 in 2 of 4 cells (0.25 to 0.50 ×): 1024/256 c1 c4"),
        ("trade-off", "higher TTFT p50 in 1 of 4 cells (2.0 ×): 4096/128 c4"),
    ]


def test_one_run_has_tendencies_that_are_marked_as_such(results: Any, tmp_path: Path) -> None:
    keys = [("1024/256", 1), ("1024/256", 4)]
    fill(results, "wide_tp", dict(zip(keys, ([100.0], [300.2]), strict=True)))
    fill(results, "external_dp", dict(zip(keys, ([300.0], [300.0]), strict=True)))
    assert tables(results, tmp_path) == {
        "wide_tp against external_dp: tendencies of a single run, no verdicts": [
            ("better", "lower TTFT p50 in 1 of 2 cells (0.33 ×): at c = 1"),
            ("worse", "none"),
            ("neither", "tok/s in all 2 cells (1.00 ×)"),
            ("neither", "TTFT p50 in 1 of 2 cells (1.00 ×): at c = 4"),
            ("neither", "TPOT p50 in all 2 cells (1.00 ×)"),
        ]
    }
    section = benefits(results, tmp_path)
    assert section is not None
    assert "Tendencies are no verdicts and may be chance" in str(section.blocks[0])


def test_repeats_that_disagree_are_no_tendency(results: Any, tmp_path: Path) -> None:
    key = ("1024/256", 1)
    fill(results, "wide_tp", {key: [80.0, 150.0]})
    fill(results, "external_dp", {key: [100.0, 100.0]})
    (title,), (rows,) = zip(*tables(results, tmp_path).items(), strict=True)
    assert title == "wide_tp against external_dp: tendencies of 2 paired repeats, no verdicts"
    assert ("neither", "TTFT p50 in 1 of 1 cell (1.15 ×)") in rows


def test_cells_without_a_verdict_are_named_with_the_reason(results: Any, tmp_path: Path) -> None:
    keys = [("64/32", 1), ("64/32", 4)]
    fill(results, "external_dp", dict.fromkeys(keys, [100.0] * 6), shared_gpu=True)
    fill(results, "wide_tp", dict.fromkeys(keys, [50.0] * 6))
    assert tables(results, tmp_path) == {
        "external_dp against wide_tp: no verdict": [
            ("64/32 c1 c4", "ranks of external_dp shared a GPU")
        ]
    }


def test_rates_are_named_and_never_put_into_a_range(results: Any, tmp_path: Path) -> None:
    for arm, slow in (("wide_tp", 100.0), ("external_dp", 200.0)):
        for rate, ttft in ((2.0, slow), (4.0, 100.0)):
            fill(results, arm, {("64/16", 0): [ttft] * 6}, rate_per_s=rate, arrival="poisson")
    (rows,) = tables(results, tmp_path).values()
    assert rows[0] == ("benefit", "lower TTFT p50 in 1 of 2 cells (0.50 ×): 64/16 2 req/s")


def test_each_other_arm_is_a_pair_and_one_arm_has_no_text(results: Any, tmp_path: Path) -> None:
    key = ("1024/256", 1)
    for number, arm in enumerate(("external_dp", "wide_tp", "direct"), start=1):
        assert (benefits(results, tmp_path) is not None) == (number > 2)
        fill(results, arm, {key: [100.0 * number] * 6})
    assert list(tables(results, tmp_path)) == [
        "external_dp against wide_tp",
        "external_dp against direct",
    ]
