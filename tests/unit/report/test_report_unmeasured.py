"""Limitations: each is listed with its fact while something was not measured, and leaves then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweeps.read import load
from sweeps.report import brief, build
from sweeps.tablefmt import Table
from sweeps.view import view

SECOND = 1_000_000_000
MOE = {"name": "moe", "experts": 64, "load_format": "auto"}
# What no sweep of one width and one kind of model can do without.
ALWAYS = [
    ("other widths of data parallelism", "DP 4 ran and no other"),
    ("dense models", "experts of the models served: moe (64)"),
]
Change = Callable[[Any], None]


def add(results: Any, arm: str, router: str, repeats: int = 6, **values: Any) -> None:
    """An arm of External DP over ib that left nothing unmeasured, in one cell."""
    usual = {"kind": "external_dp", "max_num_seqs": 16, "all2all_backend": "pplx"}
    layout = {**usual, **values.pop("layout", {})}
    layout["dp"] = values.get("dp", 4)
    config = {"arm": layout, "model": MOE, "device": "cuda", "router": router}
    cell: dict[str, Any] = {
        "arm": arm,
        "router": router,
        "shape": "1024/256",
        "concurrency": 8,
        "requests": 1,
        "tp": 2,
        "dp": 4,
        "ep": 8,
        "transport_asked": "ib",
        "transport_seen": "ib",
        "config_json": json.dumps({"arm": {**config, **values.pop("config", {})}}),
        "hardware_json": json.dumps({"machines": {"node-a": {}, "node-b": {}}}),
        **values,
    }
    for repeat in range(repeats):
        name = f"{arm} c{cell['concurrency']} r{repeat}"
        results.trial(name, repeat=repeat, **cell)
        sent = results.request(0, [10, 20], [1, 1])
        results.serving(name, [sent], wall_ns=SECOND, client_lag_flag=False)
        results.add("telemetry", name, name="power_w", value=400.0)
        results.add("status", name, when="after", endpoint="rank0", probe_ns=SECOND)
        results.add("released", name, node="node-a", left_behind="")


def thorough(results: Any) -> None:
    """The same ranks with a router and without, and their all-to-all."""
    add(results, "routed", "round_robin")
    add(results, "direct", "none")
    results.trial("a2a", measure="a2a", arm="nccl", cell="decode", ep=8)


def limitations(results: Any, folder: Path) -> list[tuple[str, ...]]:
    """Rows of the full report; the brief one has their first column in a sentence."""
    swept = view(load(results.write(folder)))
    (full,) = [section for section in build(swept) if section.title == "Limitations"]
    (table,) = [block for block in full.blocks if isinstance(block, Table)]
    rows = [tuple(cell.text for cell in row) for row in table.rows]
    (short,) = [section for section in brief(swept) if section.title == "Limitations"]
    listed = "; ".join(what for what, _ in rows)
    assert short.blocks == (f"Not shown here: {listed}. The full report says why of each.",)
    return rows


def set_trials(arm: str = "routed", **values: Any) -> Change:
    def change(results: Any) -> None:
        for row in results.rows["trials"]:
            if row["arm"] == arm:
                row.update(values)

    return change


def configured(**values: Any) -> Change:
    def change(results: Any) -> None:
        for row in results.rows["trials"]:
            if row.get("config_json"):
                config = json.loads(row["config_json"])
                config["arm"].update(values)
                row["config_json"] = json.dumps(config)

    return change


def cleared(table: str) -> Change:
    return lambda results: results.rows[table].clear()


def late_client(results: Any) -> None:
    results.rows["cells"][0].update(client_lag_flag=True, client_lag_p99_ns=1_260_000)


def throttled(results: Any) -> None:
    tags = "throttled: sw_power_cap on node-a gpu0; throttled: sw_power_cap on node-a gpu1"
    results.rows["trials"][0]["tags"] = tags
    results.rows["trials"][1]["tags"] = "sm_clock_changed: 1980 to 1635 MHz on node-a gpu0"


def one_failed_run(results: Any) -> None:
    results.rows["trials"][0].update(status="timeout", error="no token within 900 s")


def one_failed_request(results: Any) -> None:
    results.rows["requests"][0].update(state="failed", reason="no end marker")


def no_a2a(results: Any) -> None:
    results.rows["trials"] = [r for r in results.rows["trials"] if r["measure"] == "serving"]


def unprobed(results: Any) -> None:
    keep = [row for row in results.rows["status"] if row["trial_id"].startswith("routed")]
    results.rows["status"] = keep


def on_one_machine(results: Any) -> None:
    for arm in ("routed", "direct"):
        set_trials(arm, hardware_json=json.dumps({"machines": {"node-a": {}}}))(results)


def test_a_thorough_sweep_has_only_the_limits_that_every_sweep_has(
    results: Any, tmp_path: Path
) -> None:
    thorough(results)
    assert limitations(results, tmp_path) == ALWAYS


@pytest.mark.parametrize(
    ("change", "what", "fact"),
    [
        (
            set_trials(transport_status="unproved"),
            "routed over ib: that its traffic went over ib",
            "unproved in 6 of 6 trials",
        ),
        (
            set_trials(transport_status="contradicted", transport_seen="tcp"),
            "routed over ib: anything over ib",
            "tcp was seen in 6 of 6 trials",
        ),
        (
            set_trials(shared_gpu=True),
            "routed over ib: its speed (it shows function only)",
            "its ranks shared a GPU in 6 of 6 trials",
        ),
        (
            late_client,
            "routed over ib: latencies free of the client's own lag",
            "flagged in 1 of 6 trials, p99 up to 1.26 ms",
        ),
        (
            throttled,
            "speed at steady clocks",
            "throttled: sw_power_cap in 1 of 12 trials; sm_clock_changed in 1 of 12 trials",
        ),
        (cleared("telemetry"), "how steady the machine was", "no telemetry was recorded"),
        (
            one_failed_request,
            "routed over ib at 1024/256 c8",
            "1 of 6 requests failed",
        ),
        (
            on_one_machine,
            "ranks on several machines",
            "each trial ran on one machine (node-a)",
        ),
        (configured(device="cpu"), "speed on GPUs", "12 of 12 trials ran on CPU model"),
        (
            configured(model={**MOE, "load_format": "dummy"}),
            "the expert load of a trained model",
            "load_format is dummy: moe had random weights",
        ),
        (
            no_a2a,
            "how much of it is the expert collective's",
            "no all-to-all trial stands beside direct over ib, routed over ib",
        ),
        (
            unprobed,
            "that each rank of direct over ib answers by itself",
            "no direct probe was recorded",
        ),
        (
            cleared("released"),
            "that engines left no memory, process or port behind",
            "no snapshot of released devices was recorded",
        ),
    ],
)
def test_one_thing_less_is_one_limitation_more(
    results: Any, tmp_path: Path, change: Change, what: str, fact: str
) -> None:
    thorough(results)
    change(results)
    rows = limitations(results, tmp_path)
    assert [row for row in rows if row not in ALWAYS] == [(what, fact)]
    assert len(rows) == len(ALWAYS) + 1


def test_a_failed_run_is_named_and_lowers_the_repeats(results: Any, tmp_path: Path) -> None:
    thorough(results)
    one_failed_run(results)
    noise = "whether differences are larger than the noise between runs"
    assert limitations(results, tmp_path)[:2] == [
        (noise, "5 to 6 runs of each arm and cell; a verdict takes 6 paired repeats"),
        ("routed over ib at 1024/256 c8", "timeout in 1 of 6 runs"),
    ]


def test_one_run_and_cells_that_an_arm_did_not_run(results: Any, tmp_path: Path) -> None:
    add(results, "routed", "round_robin", repeats=1)
    add(results, "direct", "none", repeats=1)
    for concurrency in (16, 32):
        add(results, "routed", "round_robin", repeats=1, concurrency=concurrency)
    noise = "whether differences are larger than the noise between runs (no intervals)"
    assert limitations(results, tmp_path)[:2] == [
        (noise, "every cell ran once; a verdict takes 6 paired repeats"),
        ("direct over ib at 1024/256 c16, 1024/256 c32", "not run"),
    ]


def test_a_dense_model_leaves_experts_unmeasured(results: Any, tmp_path: Path) -> None:
    thorough(results)
    dense = {"name": "small", "experts": 0, "load_format": "dummy"}
    configured(model=dense)(results)
    for arm in ("routed", "direct"):
        set_trials(arm, ep=None)(results)
    assert limitations(results, tmp_path)[1:] == [
        ("mixture-of-experts models", "experts of the models served: small (0)"),
        ("a trained model", "load_format is dummy: small had random weights"),
    ]


def test_widths_and_models_of_both_kinds_are_named(results: Any, tmp_path: Path) -> None:
    thorough(results)
    add(results, "narrow", "none", dp=2, ep=4, config={"model": {"name": "d", "experts": 0}})
    rows = limitations(results, tmp_path)
    assert ("other widths of data parallelism", "DP 2, DP 4 ran and no other") in rows
    assert "dense models" not in [what for what, _ in rows]


def fill_published_arms(results: Any, **wide: Any) -> None:
    """External DP behind its router, and wide TP as published: four things change together."""
    add(results, "external_dp", "round_robin", concurrency=32)
    layout = {"kind": "wide_tp", **wide}
    usual: dict[str, Any] = {"tp": 8, "dp": 1, "ep": None, "transport_asked": "auto"}
    add(results, "wide_tp", "none", concurrency=32, layout=layout, **usual)


def test_arms_that_differ_in_several_respects_are_not_told_apart(
    results: Any, tmp_path: Path
) -> None:
    fill_published_arms(results)
    assert limitations(results, tmp_path)[-3:] == [
        (
            "whether layout, transport, router or batch makes the difference between"
            " external_dp over ib and wide_tp",
            "changed together: layout: external_dp TP 2 x DP 4, EP 8 / wide_tp TP 8 x DP 1; "
            "transport: ib / auto; router: round_robin / none; batch: 64 / 16",
        ),
        (
            "wide_tp with an equal batch above c = 16",
            "it admits 16 requests at once, another arm 64, and c goes up to 32; no arm of its "
            "layout admits 64",
        ),
        (
            "what the router costs",
            "no arm with router none is the twin of external_dp over ib (round_robin)",
        ),
    ]


def test_arms_that_differ_in_one_respect_are_told_apart_by_it(results: Any, tmp_path: Path) -> None:
    thorough(results)
    add(results, "other", "round_robin", layout={"all2all_backend": "deepep_low_latency"})
    add(results, "eager", "round_robin", layout={"enforce_eager": True, "extra_args": ["--x", "1"]})
    told = [what for what, _ in limitations(results, tmp_path) if what.startswith("whether")]
    assert told == []


def test_settings_of_the_engine_count_as_one_respect(results: Any, tmp_path: Path) -> None:
    thorough(results)
    add(results, "other", "none", layout={"all2all_backend": "deepep", "env": {"VLLM_X": "1"}})
    assert limitations(results, tmp_path)[-1] == (
        "whether router, all2all backend or engine settings makes the difference between routed "
        "over ib and other over ib",
        "changed together: router: round_robin / none; all2all backend: pplx / deepep; "
        "engine settings: as by default / VLLM_X=1",
    )


def test_null_engines_are_no_arms_that_missed_a_cell(results: Any, tmp_path: Path) -> None:
    thorough(results)
    layout = {"kind": "null_engine"}
    add(results, "null_x4", "none", layout=layout, arm_kind="null_engine", dp=1, ep=None)
    assert limitations(results, tmp_path) == ALWAYS


def test_processes_of_a_router_are_its_own(results: Any, tmp_path: Path) -> None:
    add(results, "routed", "round_robin", router_processes=2)
    assert limitations(results, tmp_path)[-2] == (
        "what the router costs",
        "no arm with router none is the twin of routed over ib (round_robin in 2 processes)",
    )


def test_an_arm_with_an_equal_batch_answers_the_question_of_batches(
    results: Any, tmp_path: Path
) -> None:
    fill_published_arms(results)
    layout = {"kind": "wide_tp", "max_num_seqs": 64}
    usual: dict[str, Any] = {"tp": 8, "dp": 1, "ep": None, "transport_asked": "auto"}
    add(results, "wide_tp_equal_batch", "none", concurrency=32, layout=layout, **usual)
    assert not [what for what, _ in limitations(results, tmp_path) if "equal batch" in what]


def test_batches_that_no_cell_fills_need_no_equal_one(results: Any, tmp_path: Path) -> None:
    fill_published_arms(results)
    for row in results.rows["trials"]:
        row["concurrency"] = 16
    assert not [what for what, _ in limitations(results, tmp_path) if "equal batch" in what]


def test_one_arm_and_one_without_a_known_layout(results: Any, tmp_path: Path) -> None:
    add(results, "server", "none", layout={"kind": "attached"}, dp=None, ep=None)
    rows = limitations(results, tmp_path)
    assert rows[-1] == ("any difference between arms", "server over ib is the only one")


def test_a_sweep_that_did_not_serve_has_none(results: Any, tmp_path: Path) -> None:
    results.trial("a2a", measure="a2a", arm="nccl", cell="decode", ep=8)
    swept = view(load(results.write(tmp_path)))
    assert "Limitations" not in {section.title for section in (*build(swept), *brief(swept))}
