"""The launch files: what can be checked of them without a cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.ports import map_problems
from sweeps.doctor.findings import default_ports

LAUNCH = Path(__file__).parents[2] / "sweeps" / "launch"
SLURM = LAUNCH / "slurm.sh"
WORKER_PORTS = (20000, 29999)
COMMANDS = {
    "scontrol": 'printf "node1\\nnode2\\n"',
    # A step on one node asks for its address; the step on all nodes runs what it is given.
    "srun": 'if [[ $* == *" hostname "* ]]; then echo "$HEAD_IP fe80::1"; exit; fi\n'
    "while [[ $1 == --* ]]; do shift; done\n"
    'exec "$@"',
    "ray": 'echo "ray $*"\n[[ -n ${RAY_FAILS:-} ]] && exit 0\n'
    "while [[ $1 != -- ]]; do shift; done\n"
    'shift\nexec "$@"',
    "python": 'echo "python $*"\nexit "${SWEEP_EXIT:-0}"',
}


@pytest.fixture
def submit(tmp_path: Path) -> Any:
    """Runs the script as Slurm does, with stand-ins for Slurm, Ray and Python."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, body in COMMANDS.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_folder / name).chmod(0o755)

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        slurm = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7",
            "EP_RAY_PYTHON": str(bin_folder / "python"), "HEAD_IP": "10.0.0.1",
        }  # fmt: skip
        return subprocess.run(
            ["bash", str(SLURM), *arguments],
            check=False, env=slurm | env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def test_sweep_gets_the_arguments(submit: Any, tmp_path: Path) -> None:
    done = submit("+exp=a2a_scaling", "cluster=cx7", "workload.ep=[8, 16]")
    assert done.returncode == 0, done.stderr
    ray, python = done.stdout.splitlines()
    assert ray.startswith("ray symmetric-run --address 10.0.0.1:6379 --min-nodes 2 ")
    assert python == (
        "python -m ep_ray.sweep cluster=attached +exp=a2a_scaling cluster=cx7 workload.ep=[8, 16]"
    )
    assert not list(tmp_path.glob(".ep-ray-*"))


def test_exit_code_of_the_sweep_is_that_of_the_job(submit: Any) -> None:
    assert submit("+exp=x", SWEEP_EXIT="3").returncode == 3


def test_ray_that_does_not_start_fails_the_job(submit: Any) -> None:
    done = submit("+exp=x", RAY_FAILS="1")
    assert done.returncode == 1
    assert "Ray did not start on 2 nodes" in done.stderr


def test_loopback_cannot_be_the_head_of_two_nodes(submit: Any) -> None:
    done = submit("+exp=x", HEAD_IP="127.0.1.1")
    assert done.returncode == 1
    assert "EP_RAY_HEAD_IP" in done.stderr
    assert submit("+exp=x", HEAD_IP="127.0.1.1", EP_RAY_HEAD_IP="10.0.0.9").returncode == 0
    assert submit("+exp=x", HEAD_IP="127.0.0.1", SLURM_JOB_NUM_NODES="1").returncode == 0


def test_outside_of_slurm_it_says_so(submit: Any) -> None:
    done = submit("+exp=x", SLURM_SUBMIT_DIR="")
    assert done.returncode != 0
    assert "sbatch" in done.stderr


def test_container_only_where_an_image_is_given(submit: Any) -> None:
    with_image = submit("+exp=x", EP_RAY_IMAGE="/images/x.sqsh")
    assert with_image.returncode == 0, with_image.stderr


@pytest.mark.filterwarnings("ignore")  # of what Ray's command line imports
def test_ray_knows_the_options() -> None:
    from ray.scripts.scripts import start
    from ray.scripts.symmetric_run import symmetric_run

    known = {name for option in symmetric_run.params for name in option.opts}
    assert {"--address", "--min-nodes"} <= known
    started = {name for option in start.params for name in option.opts}
    assert {"--min-worker-port", "--max-worker-port"} <= started
    text = SLURM.read_text()
    assert all(f"--{word} {port}" in text for word, port in _worker_ports())


def _worker_ports() -> list[tuple[str, int]]:
    return list(zip(("min-worker-port", "max-worker-port"), WORKER_PORTS, strict=True))


def test_engines_ports_are_not_rays() -> None:
    assert map_problems(default_ports("10.0.0.1"), (32768, 60999), WORKER_PORTS) == []


def test_kuberay_job() -> None:
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["entrypoint"].startswith("python -m ep_ray.sweep +exp=")
    assert spec["activeDeadlineSeconds"] > 0
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 1
    for group in (cluster["headGroupSpec"], workers):
        _check_group(group)


def _check_group(group: dict[str, Any]) -> None:
    assert group["rayStartParams"] == {word: str(port) for word, port in _worker_ports()}
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert mounts["/results"] in volumes
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = group["template"]["metadata"]["labels"]
    assert apart["labelSelector"]["matchLabels"] == labels
