"""Reports of synthetic all-to-all results, and of the evidence, against hand-made values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.read import load
from sweeps.report import build
from sweeps.tablefmt import Section, Table
from sweeps.view import view

US = 1_000
# (dispatch, combine) µs of two ranks in three iterations
GLOO = ([[10, 12, 30], [20, 11, 10]], [[40, 40, 40], [50, 30, 60]])
NCCL = ([[5, 5, 5], [6, 7, 8]], [[70, 70, 70], [60, 60, 60]])
CELL = {
    "measure": "a2a",
    "cell": "decode ep2 uniform",
    "phase": "decode",
    "ep": 2,
    "tokens": 128,
    "hidden": 7168,
    "experts": 256,
    "topk": 8,
    "routing": "uniform",
    "dispatch_dtype": "fp8",
    "combine_dtype": "bf16",
}
LOAD = "decode, 128 tokens, uniform routing, H 7168, 256 experts, top-8, fp8/bf16"


def add_trial(results: Any, backend: str, times: Any, **trial: Any) -> None:
    name = f"{backend}-{len(results.rows['trials'])}"
    results.trial(name, arm=backend, backend=backend, **{**CELL, **trial})
    for op, ranks in zip(("dispatch", "combine"), times, strict=True):
        facts = {"wire_bytes_out_max": 400_000, "wire_bytes_in_max": 300_000, "checked": True}
        facts |= {"wire_bytes_total": 600_000}
        facts |= {"bound_ns": 10_000.0, "link_bytes_per_s": 5e9, "graph": False}
        results.add("operations", name, op=op, max_over_mean_received_rows=1.25, **facts)
        for rank, row in enumerate(ranks):
            samples = [("cold", 0, 999)] + [("measured", i, us) for i, us in enumerate(row)]
            for role, iteration, us in samples:
                at = {"op": op, "role": role, "rank": rank, "iteration": iteration}
                results.add("samples", name, duration_ns=us * US, **at)
    results.add("samples", name, op="floor", role="floor", rank=0, iteration=0, duration_ns=2 * US)


@pytest.fixture
def two_backends(results: Any, tmp_path: Path) -> dict[str, Section]:
    add_trial(results, "gloo", GLOO)
    add_trial(results, "nccl", NCCL)
    results.trial("u", arm="uccl", backend="uccl", status="crash", error="signal 11", **CELL)
    return sections_of(results.write(tmp_path))


def sections_of(folder: Path, published: str | None = None) -> dict[str, Section]:
    return {s.title: s for s in build(view(load(folder)), published)}


def tables_of(section: Section) -> dict[str, Table]:
    return {b.title: b for b in section.blocks if isinstance(b, Table)}


def texts(table: Table) -> list[dict[str, str]]:
    return [
        {h: cell.text for h, cell in zip(table.columns, row, strict=True)} for row in table.rows
    ]


def test_headlines_stand_side_by_side_with_the_lower_marked(
    two_backends: dict[str, Section],
) -> None:
    table = tables_of(two_backends["All-to-all"])[LOAD]
    (row,) = table.rows
    cells = dict(zip(table.columns, row, strict=True))
    assert [cell.text for cell in row][:4] == ["EP2", "20.0", "2.0", "7.0"]  # 20 µs, bound 10 µs
    # maxima over ranks: gloo 20 12 30 and 50 40 60; nccl 6 7 8 and 70 70 70
    assert (cells["dispatch µs\ngloo"].text, cells["dispatch µs\ngloo"].better) == ("20.0", False)
    assert (cells["dispatch µs\nnccl"].text, cells["dispatch µs\nnccl"].better) == ("7.0", True)
    assert (cells["combine µs\ngloo"].text, cells["combine µs\ngloo"].better) == ("50.0", True)
    assert cells["combine µs\nnccl"].text == "70.0"
    assert cells["dispatch µs\nuccl"].text == "crash"
    assert "pair µs\ngloo" not in cells  # nobody timed it


def test_everything_known_of_a_cell_stands_below(two_backends: dict[str, Section]) -> None:
    tables = tables_of(two_backends["All-to-all"])
    times = texts(tables[f"{LOAD}: times"])
    assert [(t["arm"], t["op"]) for t in times] == [
        *[("gloo", "dispatch"), ("gloo", "combine")],
        *[("nccl", "dispatch"), ("nccl", "combine")],
    ]
    gloo = times[0]
    # pooled over 10 12 30 20 11 10; 400,000 bytes in 20 µs; the bound is 10 µs
    assert gloo["pooled µs\np50"] == "11.5"
    assert gloo["pooled µs\np95"] == "27.5"
    assert gloo["rank p50 µs"] == "11.0-12.0"
    assert (gloo["cold µs"], gloo["floor µs"], gloo["iterations"]) == ("999.0", "2.0", "3")
    traffic = texts(tables[f"{LOAD}: traffic and bound"])[0]
    assert (traffic["bound\nµs"], traffic["bound\nx bound"]) == ("10.0", "2.0")
    assert (traffic["bytes on the wire\nout max"], traffic["bound\nlink GB/s"]) == ("400000", "5")
    # 600,000 bytes of two ranks: each sends 300,000 to the other and keeps as many
    rates = [traffic[f"GB/s\n{name}"] for name in ("wire", "busbw", "algbw")]
    assert rates == ["20", "15", "30"]
    assert traffic["imbalance"] == "1.250"
    timed = texts(tables["What was timed"])
    assert [(t["arm"], t["op"], t["mode"], t["checked"]) for t in timed] == [
        ("gloo", "dispatch", "eager", "yes"),
        ("gloo", "combine", "eager", "yes"),
        ("nccl", "dispatch", "eager", "yes"),
        ("nccl", "combine", "eager", "yes"),
    ]


def test_ratios_are_of_the_experiments_own_backend(two_backends: dict[str, Section]) -> None:
    tables = tables_of(two_backends["All-to-all ratios"])
    assert list(tables) == ["gloo / nccl"]  # uccl crashed: nothing to divide by
    (row,) = texts(tables["gloo / nccl"])
    assert row == {"cell": "decode, uniform, EP2", "dispatch µs": "2.86", "combine µs": "0.71"}


def test_a_missing_sample_gives_no_headline_and_a_flag(results: Any, tmp_path: Path) -> None:
    add_trial(results, "gloo", ([[1, 2], [3]], [[1], [1]]))
    sections = sections_of(results.write(tmp_path))
    (row,) = texts(tables_of(sections["All-to-all"])[LOAD])
    assert (row["dispatch µs\ngloo"], row["combine µs\ngloo"]) == ("", "1.0")
    assert "iteration 1 has 0 samples of rank 1" in str(sections["Flags"].blocks)


def test_published_medians_stand_beside_only_where_everything_known_coincides(
    results: Any, tmp_path: Path
) -> None:
    add_trial(results, "deepep", GLOO, ep=16, transport_asked="ib")
    add_trial(results, "deepep", GLOO, ep=16, transport_asked="ib", routing="zipf")
    add_trial(results, "deepep", GLOO, ep=16, transport_asked="efa")
    section = sections_of(results.write(tmp_path), "pplx_garden")[
        "Beside the published all-to-all run (pplx_garden)"
    ]
    (table,) = tables_of(section).values()
    rows = [(r["op"], r["here"], r["published"], r["here / published"]) for r in texts(table)]
    assert rows == [("dispatch", "11.5", "123.9", "0.09"), ("combine", "40.0", "203.0", "0.20")]
    alone = "Only here: deepep over efa decode uniform EP16; deepep over ib decode zipf EP16."
    assert alone in str(section.blocks)


def test_the_ledger_sums_roles_once_and_names_disagreements(results: Any, tmp_path: Path) -> None:
    results.trial("s", cell="1024/256 c4", transport_status="not_applicable")
    for role, client, agrees in (("measured", 8, True), ("warmup", 4, False)):
        counts = {"client_sent": client, "client_complete": client, "router_forwarded": client}
        results.add("ledger", "s", endpoint="rank0", role=role, agrees=agrees, **counts)
    results.add("ledger", "s", endpoint="rank0", role="all", client_sent=12, engine_complete=11)
    sections = sections_of(results.write(tmp_path))
    tables = tables_of(sections["Ledger"])
    (total,) = texts(tables[""])
    assert (total["client\nsent"], total["router\nforwarded"]) == ("12", "12")
    assert (total["engine\ncomplete"], total["agree?"]) == ("11", "NO")
    assert "router\nfailed" not in total  # it never happened
    (wrong,) = texts(tables["Where the counts disagree"])
    assert (wrong["role"], wrong["client\nsent"]) == ("warmup", "4")
    flags = {row["flag"]: row["cells"] for row in texts(tables_of(sections["Flags"])[""])}
    assert flags["the ledger disagrees"] == "1024/256 c4: rank0"


def test_transport_and_flags_say_what_is_unproved_slow_or_implausible(
    results: Any, tmp_path: Path
) -> None:
    serving = {"shape": "32/16", "concurrency": 8, "requests": 32, "cell": "32/16 c8"}
    results.trial("s", transport_asked="ib", transport_status="unproved", **serving)
    cell = {"in_flight_max": 7, "client_lag_flag": True, "client_lag_p99_ns": 2_500_000}
    request = results.request(0, [10, 20], [1, 1], completion_tokens_source="text_chunks")
    results.serving("s", [request], wall_ns=10**9, plausibility="Little's law is off", **cell)
    for rank in (0, 1):
        seen = {"source": "log", "evidence": "NET/Socket", "transport": "tcp"}
        results.add("transport", "s", rank=rank, bytes_seen=100, **seen)
    sections = sections_of(results.write(tmp_path))
    flags = [(row["flag"], row["cells"]) for row in texts(tables_of(sections["Flags"])[""])]
    assert flags == [
        ("transport ib is unproved", "32/16 c8"),
        ("client late (p99); load.clients=2 may help", "32/16 c8: 2.500 ms"),
        ("plausibility", "32/16 c8: Little's law is off"),
        ("fewer in flight than asked for", "32/16 c8: 7 of 8"),
        ("completion tokens were counted from text, not from usage", "32/16 c8: 1 requests"),
    ]
    transport = tables_of(sections["Transport"])
    (evidence,) = texts(transport["Evidence"])
    assert (evidence["shows"], evidence["ranks"], evidence["bytes seen"]) == ("tcp", "2", "200")


def test_a_trial_that_left_nothing_and_one_that_hides_another_are_flagged(
    results: Any, tmp_path: Path
) -> None:
    results.trial("a", shape="32/16", concurrency=1)
    results.trial("b", shape="32/16", concurrency=1)
    flags = str(sections_of(results.write(tmp_path))["Flags"].blocks)
    assert "ended well, but its samples or requests are missing" in flags
    assert "hidden by a later trial of the same cell, arm and repeat" in flags
