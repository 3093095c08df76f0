"""What the doctor concludes from machines that it is given, and what it finds on this one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ep_ray.backends import registry
from ep_ray.config.schema import Backend
from ep_ray.doctor import main
from ep_ray.inventory import Gpu, Machine
from sweeps.available import probe
from sweeps.doctor import diagnosis
from sweeps.doctor.devices import NicPort, nic_ports, parse_gpu_states
from sweeps.doctor.diagnosis import Ability, Diagnosis, diagnose, experiments, measures
from sweeps.doctor.findings import BROKEN, NOTE, WARNING, default_ports, findings
from sweeps.doctor.node import UNLIMITED, Node, Torch
from sweeps.doctor.text import sections
from sweeps.render_text import print_report

SMI = """\
0, 580.95.05, 1980, 1980, 122.42, 33, 0x0000000000000001
1, 580.95.05, 1755, 1980, 698.11, 61, 0x0000000000000004
"""
NVLINK = {"GPU0": {"GPU1": "NV18"}, "GPU1": {"GPU0": "NV18"}}


def cpu_node(name: str = "cpu0", **change: Any) -> Node:
    machine = Machine(name, "Some CPU", 8, 64.0, (), (), (), ("eth0", "lo"))
    node = Node(
        ip="10.0.0.1",
        machine=machine,
        gpu_states=(),
        links={},
        nics=(),
        gpudirect={"nvidia_peermem": False, "gdrdrv": False, "dmabuf": False},
        torch=Torch(None, None, 0),
        versions={"ep-ray": "0.1.0", "python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cpu"},
        vllm="cpu",
        nvml=False,
        shm_bytes=8 << 30,
        memlock_bytes=8 << 20,
        ephemeral_ports=(32768, 60999),
        ray_workers=None,
        backends={"gloo": [], "nccl": ["torch sees no CUDA GPU"]},
    )
    return replace(node, **change)


def gpu_node(name: str = "gpu0", **change: Any) -> Node:
    gpus = tuple(Gpu(i, "NVIDIA H200", f"GPU-{name}-{i}", 143771) for i in range(2))
    machine = Machine(name, "Some CPU", 96, 2000.0, gpus, ("mlx5_0",), (), ("eth0", "lo"))
    node = cpu_node(
        machine=machine,
        gpu_states=parse_gpu_states(SMI),
        links=NVLINK,
        nics=(NicPort("mlx5_0", 1, "mlx5_core", "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),),
        gpudirect={"nvidia_peermem": True, "gdrdrv": False, "dmabuf": False},
        torch=Torch("13.0", "2.28.9", 2),
        vllm="cuda",
        nvml=True,
        memlock_bytes=UNLIMITED,
        backends={"gloo": [], "nccl": []},
    )
    return replace(node, **change)


def texts(nodes: list[Node], level: str) -> str:
    return "\n".join(f.text for f in findings(nodes) if f.level == level)


def test_gpu_states() -> None:
    calm, capped = parse_gpu_states(SMI)
    assert (calm.driver, calm.sm_clock_mhz, calm.throttled) == ("580.95.05", "1980", ())
    assert capped.throttled == ("sw_power_cap",)
    assert parse_gpu_states("") == ()
    assert parse_gpu_states("0, 580, [N/A], [N/A], [N/A], 30, [N/A]")[0].throttled == ()


def test_nic_ports(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_3" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text("Ethernet\n")
    (tmp_path / "mlx5_3" / "device").mkdir()
    (tmp_path / "mlx5_3" / "device" / "driver").symlink_to("../../drivers/mlx5_core")
    assert nic_ports(tmp_path) == (
        NicPort("mlx5_3", 1, "mlx5_core", "ACTIVE", "400 Gb/sec (4X NDR)", "Ethernet"),
    )


def test_a_healthy_machine() -> None:
    assert texts([cpu_node()], BROKEN) == texts([cpu_node()], WARNING) == ""
    assert "no GPU" in texts([cpu_node()], NOTE)
    assert texts([gpu_node()], BROKEN) == ""
    assert texts([gpu_node()], WARNING) == "GPU 1 is throttled now: sw_power_cap"


@pytest.mark.parametrize(
    ("node", "level", "says"),
    [
        (gpu_node(torch=Torch(None, None, 0)), BROKEN, "CPU build"),
        (gpu_node(torch=Torch("13.0", "2.28.9", 1)), BROKEN, "torch sees 1"),
        (cpu_node(ephemeral_ports=(10000, 60999)), BROKEN, "ephemeral range 10000-60999"),
        (cpu_node(ray_workers=(10002, 19999)), WARNING, "Ray's workers 10002-19999"),
        (cpu_node(shm_bytes=64 << 20), WARNING, "--shm-size"),
        (gpu_node(nvml=False), WARNING, "nvidia-ml-py"),
        (gpu_node(links={"GPU0": {"GPU1": "SYS"}, "GPU1": {"GPU0": "SYS"}}), WARNING, "NVLink"),
        (gpu_node(memlock_bytes=8 << 20), WARNING, "ulimit -l unlimited"),
        (gpu_node(gpudirect=cpu_node().gpudirect), WARNING, "GPUDirect"),
        (
            gpu_node(nics=(NicPort("mlx5_0", 1, "mlx5_core", "DOWN", "", "InfiniBand"),)),
            WARNING,
            "mlx5_0 is DOWN",
        ),
    ],
)
def test_findings_of_one_machine(node: Node, level: str, says: str) -> None:
    assert says in texts([node], level)


def test_nodes_must_be_alike() -> None:
    other = gpu_node("gpu1", versions=cpu_node().versions | {"torch": "2.9.0"})
    assert "nodes differ in torch: 2.13.0+cpu, 2.9.0" in texts([gpu_node(), other], BROKEN)
    older = gpu_node("gpu1", torch=Torch("13.0", "2.27.3", 2))
    assert "nodes differ in NCCL: 2.27.3, 2.28.9" in texts([gpu_node(), older], BROKEN)
    assert texts([gpu_node(), gpu_node("gpu1")], BROKEN) == ""


def test_the_worst_comes_first() -> None:
    levels = [f.level for f in findings([cpu_node(ephemeral_ports=(10000, 60999), shm_bytes=1)])]
    assert levels == sorted(levels, key=[BROKEN, WARNING, NOTE].index)
    assert levels[0] == BROKEN
    assert levels[-1] == NOTE


def test_default_ports_are_below_the_kernels() -> None:
    assert all(claim.last < 32768 for claim in default_ports("10.0.0.1"))


def can(nodes: list[Node]) -> dict[str, bool]:
    return {ability.name: ability.can for ability in measures(nodes)}


def test_measures() -> None:
    assert can([cpu_node()]) == {
        "all-to-all on the CPU": True,
        "all-to-all on GPUs": False,
        "serving on the CPU": True,
        "serving on GPUs": False,
    }
    both = can([gpu_node(), gpu_node("gpu1")])
    assert both["all-to-all on GPUs"]
    assert both["serving on GPUs"]
    assert not both["serving on the CPU"]
    one_without = [gpu_node(), gpu_node("gpu1", vllm=None, backends={"gloo": [], "nccl": ["no"]})]
    assert not any(word for name, word in can(one_without).items() if "GPUs" in name)


def test_healthy_needs_a_measure_and_nothing_broken() -> None:
    def healthy(node: Node) -> bool:
        return Diagnosis([node], measures([node]), [], findings([node])).healthy

    assert healthy(cpu_node())
    assert not healthy(cpu_node(ephemeral_ports=(10000, 60999)))
    assert not healthy(cpu_node(vllm=None, backends={"gloo": ["no gloo"], "nccl": ["no"]}))


@pytest.fixture(scope="module")
def shipped() -> dict[str, Ability]:
    return {ability.name: ability for ability in experiments([cpu_node()])}


def test_every_shipped_experiment_is_judged(shipped: dict[str, Ability]) -> None:
    files = {path.stem for path in (Path(__file__).parents[2] / "conf" / "exp").glob("*.yaml")}
    assert set(shipped) == files
    assert shipped["quickstart"].can
    assert not shipped["attached"].can
    assert "arm.url" in shipped["attached"].why


def test_an_experiment_says_what_it_lacks(shipped: dict[str, Ability]) -> None:
    why = shipped["a2a_scaling"].why
    assert "asked: 128 GPUs" in why
    assert "found: 0 on cpu0" in why
    assert "transport ib" in shipped["external_dp_rdma"].why or (
        "transport=ib" in shipped["external_dp_rdma"].why
    )


def test_a_probe_that_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, options: Any) -> Any:
        raise OSError("libsomething.so is missing")

    monkeypatch.setattr(registry, "load", fails)
    assert probe(Backend("gloo"), {}) == ["its adapter fails: OSError: libsomething.so is missing"]


def test_text_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [gpu_node(), gpu_node("gpu1")]
    found = Diagnosis(nodes, measures(nodes), [Ability("x", False, "a\nb")], findings(nodes))
    print_report("cluster", sections(found), sys.stdout)
    text = capsys.readouterr().out
    for word in ("gpu1", "NVIDIA H200", "NV18", "mlx5_0", "2.28.9", "sw_power_cap", "unlimited"):
        assert word in text


def test_exit_code_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnosis, "experiments", lambda nodes: [])
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is True
    assert found["nodes"][0]["backends"]["gloo"] == []
    assert diagnose([cpu_node(ephemeral_ports=(10000, 60999))]).healthy is False


def test_unreachable_cluster_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: refuses at once
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert main(["--address", address]) == 1
    error = capsys.readouterr().err
    assert address in error
    assert "ray status" in error


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, ep_ray.doctor as d\n"
        "try: d.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
