"""All-to-all trials on ranks of a real local Ray cluster: what keeps ranks, and what ends them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.compute as pc
import pytest

from ep_ray.config.compose import compose_all
from ep_ray.config.schema import DeviceKind
from ep_ray.observer import Observer
from ep_ray.watchdog import TrialError
from sweeps.a2a_host import A2aHost
from sweeps.a2a_metrics import a2a_metrics
from sweeps.outcome import Outcome, trial_row
from sweeps.plan import plan
from sweeps.read import load
from sweeps.store import Store
from sweeps.trial import A2aTrial
from tests.local_ray import local_ray

SMALL = (
    *("+exp=a2a_variants", "workload.ep=[2]", "workload.max_warmup=20", "workload.hidden=256"),
    *("workload.phases.decode.tokens=8", "workload.phases.decode.iterations=5"),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(4):
        yield


class Asked:
    """A host and the trials of a command line."""

    def __init__(self, *overrides: str) -> None:
        (config,) = compose_all([*SMALL, *overrides], multirun=False)
        planned = [t for t in plan(config, DeviceKind.cpu) if isinstance(t, A2aTrial)]
        self.trials = [t for t in planned if t.phase == "decode"]
        self.observer = Observer()
        self.host = A2aHost(config, DeviceKind.cpu, 2, f"test{os.getpid()}", self.observer)

    def pids(self) -> list[int]:
        """Processes of the ranks that stand; none before the first trial."""
        ranks = self.host._ranks
        return [fact["pid"] for fact in ranks.facts] if ranks else []


@pytest.fixture
def asked(cluster: None) -> Iterator[Any]:
    made: list[Asked] = []

    def make(*overrides: str) -> Asked:
        made.append(Asked(*overrides))
        return made[-1]

    yield make
    for one in made:
        assert one.host.close() == []
        one.observer.close()


def test_every_variant_runs_on_the_same_ranks(asked: Any) -> None:
    sweep = asked()
    pids = []
    for trial in sweep.trials:
        outcome = sweep.host.run(trial)
        assert (outcome.status, outcome.error) == ("ok", None)
        pids.append(sweep.pids())
    assert len(pids) == 3
    assert all(of == pids[0] for of in pids)


def test_what_cannot_run_is_refused_before_a_rank_is_asked(asked: Any) -> None:
    sweep = asked(
        "+backend@against.backends.odd=gloo_padded", "+against.backends.odd.options.capacity=3"
    )
    good, bad = sweep.trials[0], sweep.trials[-1]
    assert sweep.host.run(good).status == "ok"
    before = sweep.pids()
    graph = asked("cluster.device=auto", "workload.launch=[graph]")
    with pytest.raises(TrialError, match="gloo cannot run this: launch=graph on device cpu"):
        graph.host.run(graph.trials[0])
    assert graph.pids() == []
    # A capacity is only seen to overflow once a routing is there: that costs the ranks.
    with pytest.raises(TrialError, match=r"`backend.options.capacity=3`"):
        sweep.host.run(bad)
    assert sweep.pids() == []
    assert sweep.host.run(good).status == "ok"
    assert not set(before) & set(sweep.pids())


def test_combine_in_fp8_is_refused_with_the_reason(asked: Any) -> None:
    sweep = asked("workload.combine_dtype=fp8")
    with pytest.raises(TrialError, match="combine in fp8: it carries bf16"):
        sweep.host.run(sweep.trials[0])
    assert sweep.pids() == []


def test_a_rank_that_hangs_ends_the_trial_at_its_deadline(asked: Any) -> None:
    sweep = asked("deadlines.trial_s=4", "workload.phases.decode.iterations=1000000")
    sweep.host._ready(sweep.trials[0])
    pids = sweep.pids()
    stopped = threading.Timer(1.0, os.kill, (pids[1], signal.SIGSTOP))
    stopped.start()
    with pytest.raises(TrialError, match="no answer within 4 s") as caught:
        sweep.host.run(sweep.trials[0])
    stopped.join()
    assert caught.value.status == "timeout"
    # The stacks say where the healthy rank waits.
    assert "rank 0:" in caught.value.reason
    assert "rank 1: no answer" in caught.value.reason
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_real_choices_travel_from_the_driver_and_leave_their_digest(
    asked: Any, tmp_path: Path
) -> None:
    rows = np.argsort(np.random.default_rng(0).random((40, 16)), axis=1)[:, :4]
    np.save(tmp_path / "rows.npy", rows)
    sweep = asked("workload.routing=[file]", f"workload.routing_file={tmp_path}/rows.npy")
    outcome = sweep.host.run(sweep.trials[0])
    assert (outcome.status, outcome.error) == ("ok", None)
    assert len(outcome.facts["routing_digest"]) == 64
    missing = asked("workload.routing=[file]", "workload.routing_file=/nowhere/rows.npy")
    with pytest.raises(TrialError, match="no such file"):
        missing.host.run(missing.trials[0])


def test_a_way_of_measuring_reaches_tables_and_headline(asked: Any, tmp_path: Path) -> None:
    sweep = asked("workload.compat=nccl_tests", "workload.phases.decode.iterations=60")
    trial = sweep.trials[1]
    outcome: Outcome = sweep.host.run(trial)
    store = Store.create(tmp_path, "demo")
    store.append(trial_row(trial, "demo", outcome, 0), outcome.rows)
    store.close()
    (folder,) = tmp_path.iterdir()
    tables = load(folder)
    (row,) = tables["trials"].to_pylist()
    assert (row["arm"], row["compat"], row["launch"]) == ("gloo_equal", "nccl_tests", "eager")
    metrics = a2a_metrics(tables)[trial.trial_id].ops["dispatch"]
    samples = outcome.rows["samples"]
    dispatch = samples.filter(pc.equal(samples["op"], "dispatch"))
    loops = dispatch.group_by("iteration").aggregate([("duration_ns", "mean")])
    assert loops.num_rows == 3
    middle = float(np.median(loops["duration_ns_mean"].to_numpy()))
    assert metrics.headline_us == pytest.approx(middle / 1e3)
