"""`doctor load`: what it runs for real, and what it says of figures that are known."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from ep_ray.doctor import main
from serving.null_server import Pace
from sweeps.doctor.load import CELLS, QUICK, Cell, Measured, Run, measure
from sweeps.doctor.load_text import keeps_up, sections
from sweeps.render_text import print_report

RUN = Run(
    cell="paced c=64", routed=False, ok=256, failed=0, reason="", ttft_p50_ms=50.2,
    ttft_p99_ms=51.0, ttft_error_p50_ms=0.2, ttft_error_p99_ms=0.9, itl_p50_ms=10.0,
    tokens_per_s=6200.0, requests_per_s=48.0, of_ideal=0.999, client_lag_p99_ms=0.4,
    client_busy=0.124, engine_busy=0.5, router_busy=None,
)  # fmt: skip
ROUTED = replace(RUN, routed=True, ttft_p50_ms=50.5, ttft_p99_ms=53.0, router_busy=0.062)
FAST = replace(
    RUN, cell="one token c=64", of_ideal=None, itl_p50_ms=None, tokens_per_s=20000.0,
    requests_per_s=20000.0, client_busy=0.97, engine_busy=0.6,
)  # fmt: skip


def measured(*runs: Run, **cores: int) -> Measured:
    seats = cores or {"engine": 0, "client": 1, "router": 2}
    return Measured(runs, seats, (0.1, 0.2))


def said(found: Measured, capsys: pytest.CaptureFixture[str]) -> str:
    print_report("load", sections(found), sys.stdout)
    return " ".join(capsys.readouterr().out.split())


def test_every_run_is_complete_and_its_first_tokens_are_never_early():
    cells = [
        Cell("paced", Pace(20_000_000, 5_000_000), 4, 2, 6),
        Cell("at once", Pace(tokens_per_send=4), 9, 3, 12),
    ]
    found = measure(cells, repeats=2)
    assert [(r.cell, r.routed, r.ok, r.failed) for r in found.runs] == [
        ("paced", False, 6, 0), ("paced", True, 6, 0), ("paced", True, 6, 0),
        ("paced", False, 6, 0), ("at once", False, 12, 0), ("at once", True, 12, 0),
        ("at once", True, 12, 0), ("at once", False, 12, 0),
    ]  # fmt: skip
    for run in found.runs:
        assert 0 < run.ttft_error_p50_ms <= run.ttft_error_p99_ms
        assert run.client_busy > 0
        assert (run.router_busy is not None) is run.routed
    paced = [run for run in found.runs if run.cell == "paced"]
    # 4 tokens in 20 + 3 x 5 ms, two streams at once: 228.6 tokens/s at best.
    assert all(run.of_ideal == pytest.approx(run.tokens_per_s / 228.5714) for run in paced)
    assert all(run.of_ideal <= 1 and run.ttft_p50_ms >= 20 for run in paced if run.of_ideal)
    json.dumps(found.as_dict())


def test_the_sentences_are_those_of_the_figures(capsys):
    text = said(measured(RUN, ROUTED, FAST, replace(FAST, routed=True, router_busy=0.5)), capsys)
    assert (
        "paced c=64: the client sees a first token 0.20 ms late at the median and 0.90 ms at p99, "
        "and holds the pace (99.9% of the ideal rate). The router adds 0.30 ms to TTFT p50 and "
        "2.00 ms to p99." in text
    )
    assert (
        "one token c=64, no delay: 20,000 requests/s without the router, where the client" in text
    )
    assert "limits (97% of a core)" in text
    assert "fewer cores than processes" not in text
    # 0.124 s of CPU a second at 6,200 tokens a second: 20 ms for each thousand; the router half.
    assert "20.0" in text
    assert "10.0" in text


def test_shared_cores_and_a_client_that_is_too_slow_are_said(capsys):
    slow = measured(replace(RUN, of_ideal=0.8), ROUTED, engine=0, client=1, router=1)
    text = said(slow, capsys)
    assert "DOES NOT HOLD THE PACE (80.0% of the ideal rate): spread the load" in text
    assert "fewer cores than processes" in text
    assert not keeps_up(slow)
    assert keeps_up(measured(RUN, ROUTED))


def test_a_failed_request_is_named_and_decides(capsys):
    failed = measured(RUN, replace(ROUTED, ok=255, failed=1, reason="HTTP 503"))
    assert "paced c=64, through the router: 1 requests failed, the first: HTTP 503" in said(
        failed, capsys
    )
    assert not keeps_up(failed)


def test_the_quick_way_leaves_the_wide_cell_out():
    assert [cell.name for cell in CELLS if cell not in QUICK] == ["paced c=256"]


def test_the_command_says_how_it_ended(monkeypatch: pytest.MonkeyPatch, capsys):
    asked: list[Any] = []

    def measure_(*arguments: Any) -> Measured:
        asked.append(arguments)
        return measured(replace(RUN, of_ideal=0.5 if len(asked) == 1 else 1.0), ROUTED)

    monkeypatch.setattr("sweeps.doctor.load.measure", measure_)
    assert main(["load", "--quick", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["runs"][0]["of_ideal"] == 0.5
    assert main(["load"]) == 0
    assert asked == [(QUICK, 2), (CELLS, 5)]
