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
    # maxima over ranks: gloo 20 12 30 and 50 40 60; nccl 6 7 8 and 70 70 70
    assert (cells["gloo\ndispatch µs"].text, cells["gloo\ndispatch µs"].better) == ("20.0", False)
    assert (cells["nccl\ndispatch µs"].text, cells["nccl\ndispatch µs"].better) == ("7.0", True)
    assert (cells["gloo\ncombine µs"].text, cells["gloo\ncombine µs"].better) == ("50.0", True)
    assert cells["nccl\ncombine µs"].text == "70.0"
    assert cells["uccl\ndispatch µs"].text == "crash"
    assert cells["gloo\npair µs"].text == ""


def test_everything_known_of_a_cell_stands_below(two_backends: dict[str, Section]) -> None:
    tables = tables_of(two_backends["All-to-all"])
    times = texts(tables[f"{LOAD}: times"])
    assert [(t["arm"], t["op"]) for t in times] == [
        *[("gloo", "dispatch"), ("gloo", "combine")],
        *[("nccl", "dispatch"), ("nccl", "combine")],
    ]
    gloo = times[0]
    # pooled over 10 12 30 20 11 10; 400,000 bytes in 20 µs; the bound is 10 µs
    assert gloo["pooled p50"] == "11.5"
    assert gloo["pooled p95"] == "27.5"
    assert gloo["rank p50 min-max"] == "11.0-12.0"
    assert (gloo["cold"], gloo["floor"], gloo["iterations"]) == ("999.0", "2.0", "3")
    assert (gloo["bound µs"], gloo["ratio to bound"], gloo["wire GB/s"]) == ("10.0", "2.00", "20")
    facts = texts(tables[f"{LOAD}: what travelled"])[0]
    assert (facts["wire bytes out max"], facts["link GB/s"]) == ("400000", "5")
    assert (facts["imbalance"], facts["checked"], facts["graph"]) == ("1.250", "yes", "eager")


def test_ratios_are_of_the_experiments_own_backend(two_backends: dict[str, Section]) -> None:
    tables = tables_of(two_backends["All-to-all ratios"])
    assert list(tables) == ["gloo / nccl", "gloo / uccl"]
    (row,) = texts(tables["gloo / nccl"])
    assert (row["dispatch µs"], row["combine µs"], row["pair µs"]) == ("2.86", "0.71", "")


def test_a_missing_sample_gives_no_headline_and_a_flag(results: Any, tmp_path: Path) -> None:
    add_trial(results, "gloo", ([[1, 2], [3]], [[1], [1]]))
    sections = sections_of(results.write(tmp_path))
    (row,) = texts(tables_of(sections["All-to-all"])[LOAD])
    assert (row["gloo\ndispatch µs"], row["gloo\ncombine µs"]) == ("", "1.0")
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
    assert (total["client sent"], total["router forwarded"]) == ("12", "12")
    assert (total["engine complete"], total["agree?"]) == ("11", "NO")
    assert total["router failed"] == ""
    (wrong,) = texts(tables["Where the counts disagree"])
    assert (wrong["role"], wrong["client sent"]) == ("warmup", "4")
    assert "the ledger of rank0 disagrees" in str(sections["Flags"].blocks)


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
    flags = [row["flag"] for row in texts(tables_of(sections["Flags"])[""])]
    assert flags == [
        "transport ib is unproved",
        "client lag: p99 2.500 ms, the client was too slow",
        "plausibility: Little's law is off",
        "at most 7 requests in flight, 8 asked for",
        "completion tokens of 1 requests were counted from text, not from usage",
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
    assert "hidden by the later trial b" in flags


def test_versions_that_differ_between_arms_are_told_apart(results: Any, tmp_path: Path) -> None:
    results.trial("a", shape="32/16", concurrency=1)
    results.trial(
        "b", arm="other", shape="32/16", concurrency=1, versions_json='{"vllm": "0.24.0"}'
    )
    for value in (1.0, 3.0):
        at = {"node": "n0", "source": "cpu", "name": "load_1min", "unix_ns": 1}
        results.add("telemetry", "a", value=value, **at)
    tables = tables_of(sections_of(results.write(tmp_path))["What it ran on"])
    versions = [(r["value"], r["arms"]) for r in texts(tables[""]) if r["name"] == "vllm"]
    assert versions == [("0.30.0", "wide_tp"), ("0.24.0", "other")]
    (reading,) = texts(tables["Readings over the sweep"])
    assert (reading["reading"], reading["least"], reading["greatest"]) == ("load_1min", "1", "3")
