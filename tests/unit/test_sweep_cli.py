"""The command line from outside: what it prints, what it leaves, how it exits."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from ep_ray import sweep
from ep_ray.inventory import Gpu, Machine
from sweeps import sweep as sweeps_sweep

Run = Callable[..., tuple[object, str, str]]
SWEEPER = """# @package _global_
name: mine
measure: [a2a]
hydra: {mode: MULTIRUN, sweeper: {params: {workload.ep: "[2],[4]"}}}
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Runs the entry in an empty folder; gives its exit code, stdout and stderr."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["sweep", *arguments])
        with pytest.raises(SystemExit) as end:
            sweep.main()
        out, err = capfd.readouterr()
        return end.value.code, out, err

    yield call
    signal.signal(signal.SIGTERM, handler)
    assert not ray.is_initialized(), "Ray was started"
    assert not (tmp_path / "runs").exists(), "a results folder was made"


def trial_lines(out: str) -> list[str]:
    return [line.strip() for line in out.splitlines() if line.startswith("  ")]


def test_a_plan_is_printed_and_nothing_is_started(run):
    code, out, _ = run("+exp=quickstart", "plan_only=true")
    assert code == 0
    assert out.startswith("quickstart: 16 trials on cpu, repeats 1\n")
    trials = trial_lines(out)
    assert len(trials) == len(set(trials)) == 16
    assert trials[0].startswith("a2a.gloo.decode-t32-ep2-uniform.r0.")
    assert trials[-1].startswith("serving.wide_tp.128-8-c8.r0.")
    assert "serving  external_dp: 6 trials, up to 2 CPU ranks, about " in out
    assert "and 4 CPU ranks at once" in out


def test_the_plan_of_the_rdma_study_needs_no_hardware(run):
    code, out, _ = run("+exp=external_dp_rdma", "plan_only=true")
    assert code == 0
    assert out.startswith("external_dp_rdma: 36 trials on cuda, repeats 1\n")
    assert len(trial_lines(out)) == 36
    assert "and 8 GPUs at once" in out


def test_without_its_hardware_the_rdma_study_is_refused(run, monkeypatch):
    bare = Machine("bare", "cpu", 2, 8.0, (), (), (), ("lo",))
    monkeypatch.setattr(sweeps_sweep, "local_machine", lambda: bare)
    code, out, err = run("+exp=external_dp_rdma")
    assert (code, out) == (2, "")
    assert "asked: transport=ib; found: no such device in /sys/class/infiniband on bare" in err
    assert "Choose transport=tcp or transport=auto, or run where the NICs are" in err
    assert "asked: 8 GPUs for `external_dp_rdma` at 1024-256-c1; found: 0 on bare (0 GPUs)" in err
    assert "`plan_only=true` shows the trials without running them" in err
    assert "Traceback" not in err


def test_one_gpu_too_few_is_refused(run, monkeypatch):
    gpus = tuple(Gpu(i, "H200", f"GPU-{i}", 143771) for i in range(7))
    seven = Machine("seven", "cpu", 64, 512.0, gpus, ("mlx5_0",), (), ("lo",))
    monkeypatch.setattr(sweeps_sweep, "local_machine", lambda: seven)
    code, _, err = run("+exp=external_dp_rdma")
    assert code == 2
    assert "asked: 8 GPUs for `external_dp_rdma`" in err
    assert "found: 7 on seven (7 GPUs)" in err
    assert "transport=ib" not in err


def test_a_multirun_plans_every_point(run):
    code, out, _ = run("-m", "+exp=a2a_decode,a2a_prefill", "plan_only=true")
    assert code == 0
    assert "a2a_decode: 5 trials on cuda" in out
    assert "a2a_prefill: 5 trials on cuda" in out


def test_an_experiment_of_ones_own_sweeps_by_itself(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "exp").mkdir()
    (folder / "exp" / "mine.yaml").write_text(SWEEPER)
    own = ("--config-dir", str(folder), "plan_only=true")
    code, out, _ = run(*own, "+exp=mine")
    assert code == 0
    assert [line.split(".")[2] for line in trial_lines(out)] == [
        "decode-t32-ep2-uniform", "prefill-t256-ep2-uniform",
        "decode-t32-ep4-uniform", "prefill-t256-ep4-uniform",
    ]  # fmt: skip
    code, out, _ = run(*own, "+exp=mine", "workload.ep=[8]")
    assert code == 0
    assert {line.split(".")[2].split("-")[2] for line in trial_lines(out)} == {"ep8"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no experiment chosen: write +exp=NAME"),
        (("+exp=quickstart", "+arm.tpp=1", "--cfg", "job"), "unknown key `arm.tpp`"),
        (("-m", "+exp=quickstart", "seed=1,2", "--cfg", "job"), "--cfg shows one configuration"),
        (("-m", "+exp=quickstart", "repeats=1,0"), "`repeats=0`: at least 1"),
        (("-m", "+exp=a2a_decode,quickstart"), "`cluster` cannot differ within one sweep"),
        (("--config-name", "mine", "+exp=quickstart"), "--config-name would replace the schema"),
        (("--config-dir", "nowhere", "+exp=quickstart"), "--config-dir=nowhere: no such folder"),
        (("+exp=quickstart", "resume=nowhere"), "resume=nowhere: no sweep there"),
        (("+exp=quickstart", "backend.name=glo"), "backend 'glo' is unknown"),
        (("+exp=attached", "arm.url=http://127.0.0.1:1"), "does not answer as an OpenAI"),
    ],
)
def test_what_cannot_run_exits_with_2_and_says_why(run, arguments, says):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ep-ray: ")
    assert says in err
    assert "Traceback" not in err


def test_a_results_folder_that_cannot_be_made(run, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run("+exp=quickstart", "measure=[a2a]", "results=file")
    assert code == 2
    assert "cannot write results to file: Not a directory" in err


def test_the_resolved_configuration_is_printed(run):
    code, out, _ = run("--cfg", "job", "+exp=external_dp_rdma", "arm.max_num_seqs=64")
    assert code == 0
    for line in ("name: external_dp_rdma", "vllm_port: 19500", "max_num_seqs: 64", "kind: ib"):
        assert line in out
