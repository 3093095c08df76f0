"""The attribution: what a router and a collective took, from rows with known differences."""

from __future__ import annotations

import json

import pytest

from sweeps.attribution import collective_shares, router_shares
from sweeps.read import load
from sweeps.report_attribution import sections
from sweeps.view import view

EXTERNAL = {"kind": "external_dp", "tp": 1, "dp": 2, "enable_ep": True, "max_num_seqs": 16}


def config(**arm) -> str:
    return json.dumps({"arm": {"arm": {"name": "x", **arm}}})


def add_arm(results, arm: str, ttft_ms: float, gap_ms: float, repeat: int = 0, **values) -> None:
    """One request of three tokens: TTFT and TPOT are the two arguments."""
    trial_id = f"{arm}-{repeat}"
    base = {"arm": arm, "repeat": repeat, "shape": "16/3", "concurrency": 4, "arm_kind": "x"}
    results.trial(trial_id, **{**base, **values})
    at = [ttft_ms, ttft_ms + gap_ms, ttft_ms + 2 * gap_ms]
    results.serving(trial_id, [results.request(0, at, [1, 1, 1])], wall_ns=10**9)


def isolated(results, repeats: int = 1):
    null = {"arm_kind": "null_engine"}
    for r in range(repeats):
        own = {"config_json": config(**EXTERNAL), "dp": 2, "ep": 2, "moe_layers": 26}
        add_arm(results, "ext", 103 + r, 12, r, router="round_robin", **own)
        add_arm(results, "ext_direct", 100, 11, r, router="none", **own)
        behind = config(kind="null_engine", dp=2)
        add_arm(results, "null_x2_round_robin", 50.5, 10, r, config_json=behind, **null)
        add_arm(results, "null_x2_direct", 50.25, 10, r, config_json=behind, **null)
    return results


def alone(results, launch: str, us: float, phase: str = "decode_2", **values) -> None:
    trial_id = f"a2a-{launch}-{phase}"
    facts = {"measure": "a2a", "arm": "nccl_equal", "phase": phase, "ep": 2, "launch": launch}
    results.trial(trial_id, **{**facts, **values})
    for rank in range(2):
        sample = {"op": "pair", "role": "measured", "rank": rank, "iteration": 0}
        results.add("samples", trial_id, **sample, duration_ns=round(us * 1000))


def seen(results, tmp_path):
    return view(load(results.write(tmp_path / "r")))


def test_what_the_router_adds_to_engines_and_to_null_engines(results, tmp_path):
    (share,) = router_shares(seen(isolated(results), tmp_path))
    assert (share.arm, share.policy, share.cell.load) == ("ext", "round_robin", "c4")
    added = {metric: d and round(d.value, 6) for metric, d in share.added.items()}
    assert added == {"ttft_p50_ms": 3.0, "ttft_p99_ms": 3.0, "tpot_p50_ms": 1.0}
    to_null = {metric: d and round(d.value, 6) for metric, d in share.added_to_null.items()}
    assert to_null == {"ttft_p50_ms": 0.25, "ttft_p99_ms": 0.25, "tpot_p50_ms": 0.0}


def test_with_repeats_the_difference_has_an_interval(results, tmp_path):
    (share,) = router_shares(seen(isolated(results, repeats=3), tmp_path))
    ttft = share.added["ttft_p50_ms"]
    assert (ttft.value, ttft.low, ttft.high, ttft.repeats) == pytest.approx((4, 3, 5, 3))


def test_null_engines_never_stand_beside_engines(results, tmp_path):
    grid = seen(isolated(results), tmp_path).serving
    assert {key.shape: sorted(arms) for key, arms in grid.items()} == {
        "16/3": ["ext", "ext_direct"],
        "16/3 null engines": ["null_x2_direct", "null_x2_round_robin"],
    }


def test_the_collective_alone_beside_the_arm(results, tmp_path):
    isolated(results)
    alone(results, "eager", 150.0)
    alone(results, "graph", 100.0)
    alone(results, "eager", 500.0, "prefill_16")
    decode, prefill = collective_shares(seen(results, tmp_path))
    assert (decode.arm, decode.phase, decode.tokens) == ("ext", "decode", 2)
    assert (decode.launch, decode.pair_us, decode.of_ms) == ("graph", 100.0, 12.0)
    assert decode.step_ms == pytest.approx(2.6)
    assert decode.share == pytest.approx(2.6 / 12)
    assert (prefill.phase, prefill.tokens, prefill.launch) == ("prefill", 16, "eager")
    assert prefill.share == pytest.approx(13.0 / 103)


def test_a_collective_of_another_size_or_transport_is_not_the_arms(results, tmp_path):
    isolated(results)
    alone(results, "eager", 150.0, "decode_4")
    alone(results, "graph", 150.0, transport_asked="tcp")
    assert list(collective_shares(seen(results, tmp_path))) == []


def test_the_report_shows_both(results, tmp_path):
    isolated(results)
    alone(results, "graph", 100.0)
    (section,) = sections(seen(results, tmp_path))
    about, routers, _, collectives = section.blocks
    assert "One run: no difference is shown to be real." in about
    assert [cell.text for cell in routers.rows[0]] == [
        *("16/3 c4", "ext", "round_robin"),
        *("+3.000", "+3.000", "+1.000", "+0.250", "+0.250", "+0.000"),
    ]
    assert [cell.text for cell in collectives.rows[0]] == [
        *("16/3 c4", "ext", "decode", "2", "nccl_equal", "graph", "100.0", "26", "2.600"),
        "22 % of TPOT",
    ]


def test_a_sweep_without_it_says_nothing(results, tmp_path):
    add_arm(results, "ext", 103, 12, router="round_robin", config_json=config(**EXTERNAL))
    add_arm(results, "wide_tp", 100, 12)
    assert sections(seen(results, tmp_path)) == []
