"""Load from two client processes: round a group of ranks, through a router, and in a sweep."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray

from ep_ray.config.compose import compose_all
from ep_ray.config.schema import Config, DeviceKind
from ep_ray.watchdog import TrialError
from serving import engine_http
from serving.ledger import reconcile
from serving.load.metrics import in_flight_max
from serving.load.prompts import CallSpec, build_requests
from serving.load.target import Target
from serving.null_engine import Running, running
from serving.null_server import Pace
from sweeps.driver import Driver, arrivals_of
from sweeps.plan import plan
from sweeps.trial import ServingTrial
from tests.sweep_process import SweepProcess, free_ports, kill

DEADLINE_S = 60.0
PACE = Pace(ttft_ns=5_000_000, itl_ns=2_000_000)
TOKENS, MEASURED, WARMUPS, CALIBRATION = 8, 24, 3, 1
CLOSED = ("load.concurrency=[5]",)
OPEN = ("load.arrival=poisson", "load.rate=[200]", "load.duration_s=0.1")


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Running]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running(PACE)) for _ in range(2)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def driver(cluster: None) -> Iterator[Driver]:
    driver = Driver("test", clients=2)
    yield driver
    driver.close()


def cell_of(*overrides: str) -> tuple[Config, ServingTrial]:
    (config,) = compose_all(
        [
            *("+exp=attached", "arm.url=http://h:1", f"load.shapes=[8/{TOKENS}]"),
            *(f"load.min_requests={MEASURED}", "load.requests_per_slot=1", "load.clients=2"),
            *overrides,
        ],
        multirun=False,
    )
    (trial,) = plan(config, DeviceKind.cpu)
    assert isinstance(trial, ServingTrial)
    return config, trial


def requests_of(
    trial: ServingTrial, completion_tokens: int = TOKENS, warm: bool = True
) -> list[Any]:
    spec = CallSpec("null", "completions", 8, completion_tokens, 1000)
    roles = {"measured": MEASURED}
    roles |= {"warmups": WARMUPS, "calibration": CALIBRATION} if warm else {}
    return build_requests(spec, seed=0, trial_id=trial.trial_id, **roles)


def counted(engines: list[Running]) -> dict[str, dict[str, int]]:
    found = {}
    for engine in engines:
        now = engine_http.stable_counters(lambda e=engine: engine_http.counters(e.url), DEADLINE_S)
        found[engine.url] = {"complete": now.complete, "aborted": now.aborted}
    return found


def in_flight(engines: list[Running]) -> int:
    return sum(engine_http.counters(engine.url).running for engine in engines)


@pytest.mark.parametrize("load", [CLOSED, OPEN], ids=["closed", "open"])
def test_two_clients_go_round_the_ranks_as_one_does(driver, engines, load):
    config, trial = cell_of(*load)
    requests = requests_of(trial)
    targets = [Target.parse(engine.url, "completions", engine.url) for engine in engines]
    before = counted(engines)
    cell = driver.send(targets, requests, trial, config, lambda: None)
    after = counted(engines)
    assert [r.request_id for r in cell.requests] == [r.request_id for r in requests]
    assert {r.state for r in cell.requests} == {"complete"}
    for place, record in enumerate(cell.requests):
        assert record.endpoint == engines[place % 2].url
    grown = {u: {k: n - before[u][k] for k, n in after[u].items()} for u in after}
    rows = reconcile(cell.requests, [engine.url for engine in engines], None, grown)
    assert {row.agrees for row in rows} == {True}
    totals = [row for row in rows if row.role == "all"]
    assert [row.engine_complete for row in totals] == [(MEASURED + WARMUPS + CALIBRATION) / 2] * 2
    assert_one_cell(cell, trial, config)


def assert_one_cell(cell: Any, trial: ServingTrial, config: Config) -> None:
    """Its measured part begins once all is warm, and its figures are of all requests."""
    measured = [r for r in cell.requests if r.role == "measured"]
    warm = [r for r in cell.requests if r.role != "measured"]
    assert Counter(r.role for r in warm) == {"warmup": WARMUPS, "calibration": CALIBRATION}
    assert max(r.end_ns for r in warm) < min(r.intended_ns for r in measured)
    assert cell.first_sent_ns == min(r.sent_ns for r in measured)
    assert cell.wall_ns == max(r.end_ns for r in measured) - cell.first_sent_ns
    assert cell.in_flight_max == in_flight_max([(r.sent_ns, r.end_ns) for r in measured])
    arrivals = arrivals_of(trial, config)
    if arrivals is None:
        assert cell.in_flight_max == trial.concurrency
        return
    (start_ns,) = {r.intended_ns - at for r, at in zip(measured, arrivals, strict=True)}
    assert all(r.sent_ns >= r.intended_ns >= start_ns for r in measured)


def test_a_client_that_dies_ends_the_cell_and_the_other_client(driver, engines):
    config, trial = cell_of(*CLOSED)
    # Minutes at this pace.
    endless = requests_of(trial, completion_tokens=100_000, warm=False)
    target = Target.parse(engines[0].url, "completions")
    asked: list[int] = []

    def hurt() -> None:
        if not asked:
            asked.append(1)
            ray.kill(driver._clients[1])

    with pytest.raises(TrialError, match="the load client 2 of 2: its actor died") as caught:
        driver.send([target], endless, trial, config, hurt)
    assert caught.value.status == "crash"
    # The other one is idle: its process takes up another cell at once.
    few = requests_of(trial)[:1]
    run = driver._clients[0].run.remote([target], few, 1, DEADLINE_S)
    assert [r.state for r in ray.get(run, timeout=DEADLINE_S).requests] == ["complete"]


def test_an_arm_that_dies_while_clients_warm_up_stops_them_all(driver, engines):
    config, trial = cell_of(*CLOSED)
    endless = requests_of(trial, completion_tokens=100_000)
    target = Target.parse(engines[0].url, "completions")

    def gone() -> None:
        raise TrialError("crash", "rank 0 died")

    with pytest.raises(TrialError, match="rank 0 died"):
        driver.send([target], endless, trial, config, gone)
    few = requests_of(trial)
    cell = driver.send([target], few, trial, config, lambda: None)
    assert {r.state for r in cell.requests} == {"complete"}


def overrides(urls: list[str], port: int) -> list[str]:
    return [
        *("+exp=attached", "cluster.dashboard=false", "model.vocab_size=1000"),
        *(f"arm.url={urls[0]}", f"arm.rank_urls=[{','.join(urls)}]", "arm.router=round_robin"),
        *(f"router.port={port}", "load.clients=2", f"load.warmups={WARMUPS}"),
        *(f"load.min_requests={MEASURED}", "load.requests_per_slot=1"),
    ]


def test_a_sweep_with_two_clients_has_the_tables_of_one(engines, tmp_path: Path):
    urls = [engine.url for engine in engines]
    for number, load in enumerate((CLOSED, OPEN)):
        folder = tmp_path / str(number)
        folder.mkdir()
        ran = SweepProcess(
            folder, *overrides(urls, free_ports()), *load, f"load.shapes=[8/{TOKENS}]"
        )
        assert ran.wait() == 0, ran.output
        ran.assert_nothing_left()
        tables = ran.tables()
        (trial,) = tables["trials"]
        assert (trial["status"], trial["clients"]) == ("ok", 2), trial["error"]
        roles = Counter(row["role"] for row in tables["requests"])
        assert roles == {"measured": MEASURED, "warmup": WARMUPS, "calibration": CALIBRATION}
        placed = Counter(row["endpoint"] for row in tables["requests"])
        assert placed == dict.fromkeys(urls, (MEASURED + WARMUPS + CALIBRATION) / 2)
        ledger = [row for row in tables["ledger"] if row["role"] == "all"]
        assert [row["router_forwarded"] for row in ledger] == list(placed.values())
        assert {row["agrees"] for row in ledger} == {True}
        report = (ran.results / "report.md").read_text()
        assert "load from 2 client processes" in report


def test_a_sweep_whose_client_is_killed_loses_that_cell_alone(engines, tmp_path: Path):
    urls = [engine.url for engine in engines]
    cells = ("model.max_model_len=200000", f"load.shapes=[8/100000,8/{TOKENS}]")
    ran = SweepProcess(tmp_path, *overrides(urls, free_ports()), *CLOSED, *cells)
    try:
        # What comes before the measured requests is all in flight at once.
        ran.until(lambda: in_flight(engines) == WARMUPS + CALIBRATION, "load of the first cell")
        clients = ran.pids("ray::LoadClientActor")
        assert len(clients) == 2
        kill(clients[:1], signal.SIGKILL)
        assert ran.wait() == 1, ran.output
        ran.assert_nothing_left()
        lost, fine = ran.trials()
    finally:
        ran.destroy()
    assert (lost["status"], fine["status"]) == ("crash", "ok")
    assert "the load client" in lost["error"]
    assert "of 2: its actor died" in lost["error"]
