"""What a machine has, and which of its GPUs a process may see."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from ep_ray.inventory import Gpu, effective_env, gpus, local_machine, versions, visible_gpus

FOUR = tuple(Gpu(i, "NVIDIA H200", f"GPU-{i}{i}aa-bb{i}", 143771) for i in range(4))
SMI = """#!/bin/sh
test "$1 $2" = "--query-gpu=index,name,uuid,memory.total --format=csv,noheader,nounits" || exit 9
echo "0, NVIDIA H200, GPU-00aa-bb0, 143771"
echo "1, NVIDIA H200, GPU-11aa-bb1, 143771.5"
echo "garbage"
"""


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 3 , 1 ", [3, 1]),
        ("GPU-11aa-bb1,GPU-33aa-bb3", [1, 3]),
        ("GPU-2", [2]),
        ("GPU-", []),  # the beginning of several
        ("1,-1,2", [1]),  # CUDA shows nothing after an entry that names no GPU
        ("0,7,1", [0]),
        ("0,0", [0]),
        ("NoDevFiles", []),
        ("void", []),
    ],
)
def test_cuda_visible_devices_filters_and_orders(visible, indices):
    assert [gpu.index for gpu in visible_gpus(FOUR, visible)] == indices


def test_a_mig_slice_is_a_device_of_which_only_the_uuid_is_known():
    (gpu,) = visible_gpus(FOUR, "MIG-41b3")
    assert (gpu.uuid, gpu.name) == ("MIG-41b3", "MIG slice")


def put_smi(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_drivers_list_is_read(tmp_path, monkeypatch):
    put_smi(tmp_path, SMI, monkeypatch)
    assert gpus() == (
        Gpu(0, "NVIDIA H200", "GPU-00aa-bb0", 143771),
        Gpu(1, "NVIDIA H200", "GPU-11aa-bb1", 143771),
    )


def test_this_machine_honours_the_environment_it_is_given(tmp_path, monkeypatch):
    put_smi(tmp_path, SMI, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in local_machine().gpus] == [1]
    assert [gpu.index for gpu in local_machine({}).gpus] == [0, 1]
    assert local_machine({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho No devices were found\n"])
def test_a_driver_without_devices_gives_none(tmp_path, monkeypatch, text):
    put_smi(tmp_path, text, monkeypatch)
    assert gpus() == ()


def test_without_a_driver_there_are_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == ()


def test_a_real_machine():
    machine = local_machine()
    assert machine.hostname == socket.gethostname()
    assert machine.cpu
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.memory_gib > 0.5
    assert "lo" in machine.interfaces
    assert machine.as_dict()["cores"] == machine.cores


def test_versions_of_what_is_installed():
    found = versions()
    assert {"ep-ray", "python", "kernel", "ray", "torch", "pyarrow", "hydra-core"} <= set(found)
    assert "deep-ep" not in found


def test_only_variables_of_the_libraries_are_recorded():
    environ = {
        "NCCL_B": "1",
        "NCCL_A": "2",
        "FI_X": "3",
        "PATH": "no",
        "MY_NCCL_": "no",
        "VLLM_": "",
    }
    assert list(effective_env(environ).items()) == [
        ("FI_X", "3"), ("NCCL_A", "2"), ("NCCL_B", "1"), ("VLLM_", ""),
    ]  # fmt: skip
