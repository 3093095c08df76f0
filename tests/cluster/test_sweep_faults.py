"""Sweeps of the all-to-all benchmark that are killed, interrupted, hurt and resumed, for real."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sweeps.store import read_all
from tests.sweep_process import GONE_S, SweepProcess, counts, kill

ROUTING = ("uniform", "zipf", "balanced", "one_hot")
SMALL = (
    "+exp=quickstart",
    "measure=[a2a]",
    "cluster.dashboard=false",
    "workload.ep=[2]",
    "workload.hidden=128",
    f"workload.routing=[{','.join(ROUTING)}]",
    "workload.max_warmup=40",
    "workload.phases.decode={tokens:8,iterations:5}",
    "workload.phases.prefill={tokens:16,iterations:5}",
)
# Four trials that last for a few seconds each, so that a fault meets them in a collective.
LONG = (
    *SMALL,
    "~workload.phases.prefill",
    "workload.phases.decode={tokens:8,iterations:600}",
)
Start = Callable[..., SweepProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[SweepProcess] = []

    def begin(*overrides: str, stdout: int | None = None) -> SweepProcess:
        started.append(SweepProcess(tmp_path, *overrides, stdout=stdout))
        return started[-1]

    yield begin
    for sweep in started:
        sweep.destroy()


@pytest.mark.timeout(600)
def test_killed_driver_loses_and_repeats_nothing(start: Start) -> None:
    more = ",".join(f"t{n}:{{tokens:{n},iterations:5}}" for n in (1, 2, 4))
    plan = (*SMALL, "workload.ep=[1,2]", f"+workload.phases={{{more}}}")
    killed = start(*plan)
    killed.until_trials(5)
    killed.signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    killed.assert_nothing_left(GONE_S)
    before = killed.trials()
    assert 5 <= len(before) < 40
    assert set(counts(before, "status")) == {"ok"}

    resumed = start(*plan, f"resume={killed.results}")
    resumed.until(lambda: "already done" in resumed.output, "start of the resumed sweep")
    second = start(*plan, f"resume={killed.results}")
    assert second.wait() == 2
    assert "another sweep is writing to" in second.output
    assert resumed.wait() == 0, resumed.output
    resumed.assert_nothing_left()
    tables = resumed.tables()
    rows = {row["trial_id"]: row for row in tables["trials"]}
    assert len(rows) == len(tables["trials"]) == 40
    assert [rows[row["trial_id"]] for row in before] == before
    # Each operation of each trial was timed once, on every rank.
    assert counts(tables["operations"], "trial_id") == dict.fromkeys(rows, 3)
    cold = [row for row in tables["samples"] if row["role"] == "cold"]
    assert counts(cold, "trial_id") == {name: 3 * row["ep"] for name, row in rows.items()}

    other = start(*plan, "seed=1", f"resume={killed.results}")
    assert other.wait() == 2
    assert "none of its 40 trials is in this experiment" in other.output
    assert resumed.tables() == tables


def in_ray(sweep: SweepProcess) -> None:
    sweep.until(lambda: sweep.pids("raylet"), "start of Ray")
    assert "results in" not in sweep.output


def in_ranks(sweep: SweepProcess) -> None:
    sweep.until(lambda: "results in" in sweep.output, "start of the sweep")
    sweep.until(lambda: sweep.pids("default_worker.py"), "start of the ranks")


def in_trial(sweep: SweepProcess) -> None:
    sweep.until_trials(1)
    sweep.until(lambda: sweep.pids("ray::Rank.run"), "a trial")


@pytest.mark.parametrize(
    ("phase", "signum", "times"),
    [
        (in_ray, signal.SIGTERM, 1),
        (in_ranks, signal.SIGINT, 1),
        (in_trial, signal.SIGINT, 2),
    ],
)
def test_interrupt_leaves_finished_trials_and_nothing_else(
    start: Start, phase: Callable[[SweepProcess], None], signum: int, times: int
) -> None:
    sweep = start(*LONG)
    phase(sweep)
    for again in range(times):
        if again:
            sweep.until(lambda: is_ending(sweep), "teardown")
        sweep.signal(signum, group=signum == signal.SIGINT)
    assert sweep.wait() == 1, sweep.output
    sweep.assert_nothing_left()
    assert "ep-ray: interrupted" in sweep.output
    assert f"resume={sweep.results}" in sweep.output
    assert "Traceback" not in sweep.output
    expected = 1 if phase is in_trial else 0
    assert [row["status"] for row in sweep.trials()] == ["ok"] * expected
    assert (sweep.results / "trials.parquet").is_file()


def is_ending(sweep: SweepProcess) -> bool:
    """Whether the first rank is gone: then the driver is ending the others."""
    return len(sweep.pids("ray::Rank")) < 2


def test_interrupt_during_the_report(start: Start) -> None:
    """A pipe that is full and that nobody reads holds the report up."""
    read, write = os.pipe()
    sweep = start(*SMALL, "workload.routing=[uniform]", stdout=write)
    with os.fdopen(read, "rb", buffering=0) as output:
        folder = Path(output.readline().decode().rpartition("results in ")[2].strip())
        fill(write)
        sweep.until(lambda: len(sweep.trials()) == 2, "the trials")
        sweep.until(lambda: not (folder / "stream").exists(), "the report")
        sweep.signal(signal.SIGINT)
        os.close(write)
        output.read()
    assert sweep.wait() == 1, sweep.output
    sweep.assert_nothing_left()
    assert "cut short: 2 of 2 trials ended" in sweep.output
    assert [row["status"] for row in sweep.trials()] == ["ok", "ok"]


def fill(pipe: int) -> None:
    """Writes until nothing fits; by a description of its own, for the sweep's must block."""
    again = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(again, b".")
    except BlockingIOError:
        os.close(again)


@pytest.mark.timeout(600)
def test_killed_and_hanging_ranks_become_rows_and_the_sweep_goes_on(start: Start) -> None:
    sweep = start(*LONG, "deadlines.trial_s=30")
    sweep.until(lambda: len(sweep.pids("ray::Rank.run")) == 2, "the first trial")
    kill(sweep.pids("ray::Rank.run")[1:], signal.SIGKILL)
    sweep.until_trials(1)
    sweep.until(lambda: len(sweep.pids("ray::Rank.run")) == 2, "the second trial")
    hanging = sweep.pids("ray::Rank.run")
    kill(hanging[1:], signal.SIGSTOP)
    sweep.until_trials(2)
    assert not set(hanging) & set(sweep.pids())
    assert sweep.wait() == 1, sweep.output
    sweep.assert_nothing_left()
    crash, timeout, *fine = sweep.trials()
    assert crash["status"] == "crash"
    assert "died" in crash["error"]
    assert timeout["status"] == "timeout"
    assert "no answer within 30 s" in timeout["error"]
    assert "thread MainThread" in timeout["error"]
    assert ": no answer" in timeout["error"]
    assert [row["status"] for row in fine] == ["ok", "ok"]
    assert (
        f"2 trials failed, 0 did not run; again with the same command and resume={sweep.results}"
        in sweep.output
    )

    again = start(*LONG, "deadlines.trial_s=30", f"resume={sweep.results}")
    assert again.wait() == 0, again.output
    assert [(row["trial_id"], row["attempt"], row["status"]) for row in again.trials()[4:]] == [
        (row["trial_id"], 2, "ok") for row in (crash, timeout)
    ]


def test_folder_that_takes_no_data_is_refused_before_anything_starts(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    sweep = start(*SMALL, f"results={tmp_path}/file/runs")
    assert sweep.wait() == 2
    assert f"cannot write results to {tmp_path}/file/runs: Not a directory" in sweep.output
    assert "results=FOLDER" in sweep.output


ON_SMALL_DISK = """
mount -t tmpfs -o size=$1 none disk || exit 77
shift
"$@"
code=$?
cp -r disk copy
exit $code
"""


def on_small_disk(folder: Path, size: str, *overrides: str) -> tuple[int, str]:
    """A sweep whose results go to a disk of `size`; exit code and output. Skips where it can't."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    (folder / "disk").mkdir()
    command = [sys.executable, "-m", "ep_ray.sweep", *SMALL, "results=disk", *overrides]
    found = subprocess.run(
        ["unshare", "-rm", "bash", "-c", ON_SMALL_DISK, "bash", size, *command],
        check=False, cwd=folder, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    if found.returncode == 77 or "unshare: unshare failed" in found.stderr:
        pytest.skip("needs the right to mount in a namespace")
    return found.returncode, found.stdout + found.stderr


def test_full_disk_is_refused_before_anything_starts(tmp_path: Path) -> None:
    code, output = on_small_disk(tmp_path, "512k")
    assert code == 2, output
    assert "No space left on device" in output
    assert list((tmp_path / "copy").iterdir()) == []


def test_disk_that_fills_up_ends_the_sweep_and_keeps_what_fitted(tmp_path: Path) -> None:
    # A trial takes 1.1 to 1.2 MB: half as much again lets one fit, and never two.
    code, output = on_small_disk(
        tmp_path, "1800k", "workload.phases.decode.iterations=2000", "~workload.phases.prefill"
    )
    assert code == 1, output
    assert "No space left on device" in output
    assert "Traceback" not in output
    (folder,) = (tmp_path / "copy").iterdir()
    tables = read_all(folder)
    done = tables["trials"]["trial_id"].to_pylist()
    assert 1 <= len(done) < 4
    assert set(tables["samples"]["trial_id"].to_pylist()) == set(done)
