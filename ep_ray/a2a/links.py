"""Which ranks share a node, and how fast the links between ranks are, measured in the run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ep_ray.a2a.bounds import Links

PEER_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
"""Most bytes to each peer: so large that latency does not count."""
SENT_BYTES = 2 << 30
"""Most bytes to all peers together."""
REPEATS = 7


@dataclass(frozen=True)
class Fabric:
    """What a communicator runs on: its links, and whether all ranks read the same clock."""

    links: Links
    shared_clock: bool


def measure_fabric(group: ProcessGroup, device: torch.device) -> Fabric:
    """Measured once for a communicator; collective."""
    hosts = gather_hosts(group)
    links = measure_links(group, device, node_size(hosts))
    return Fabric(links, shared_clock=len(set(hosts)) == 1)


def host_id() -> str:
    """Names the running kernel: ranks with the same id share memory and a monotonic clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def gather_hosts(group: ProcessGroup) -> list[str]:
    """`host_id` of every rank; collective."""
    hosts = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, host_id(), group=group)
    return hosts


def node_size(hosts: list[str]) -> int:
    """Ranks per node.

    Raises:
        ValueError: Nodes hold different numbers of ranks, or their ranks are not consecutive.
    """
    size = hosts.count(hosts[0])
    nodes = hosts[::size]
    if len(set(nodes)) * size != len(hosts) or [n for n in nodes for _ in range(size)] != hosts:
        raise ValueError(
            f"ranks are not spread evenly and in order over nodes: {hosts};"
            " sort ranks by node and take the same number from each"
        )
    return size


def measure_links(group: ProcessGroup, device: torch.device, size: int) -> Links:
    """Rates inside a node of `size` ranks and between nodes; collective."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    near = [peer for peer in range(ranks) if peer // size == rank // size and peer != rank]
    far = [peer for peer in range(ranks) if peer // size != rank // size]
    intra = measure_link(group, device, near) if size > 1 else None
    inter = measure_link(group, device, far) if ranks > size else None
    return Links(size, intra, inter)


def measure_link(group: ProcessGroup, device: torch.device, peers: list[int]) -> float:
    """Bytes/s that leave this rank while all ranks send large messages to their `peers`.

    The fastest of several exchanges, each as slow as its slowest rank: a bound must not be
    beaten because the link was measured on a bad day. The same on every rank; collective.
    """
    each = min(PEER_BYTES[device.type], SENT_BYTES // len(peers))
    splits = [each if peer in peers else 0 for peer in range(dist.get_world_size(group))]
    sent = torch.ones(sum(splits), dtype=torch.uint8, device=device)
    got = torch.empty_like(sent)
    slowest = torch.tensor([_exchange_s(group, sent, got, splits) for _ in range(REPEATS)])
    slowest = slowest.to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return sum(splits) / float(slowest.min())


def _exchange_s(
    group: ProcessGroup, sent: torch.Tensor, got: torch.Tensor, splits: list[int]
) -> float:
    dist.barrier(group)
    _synchronise(sent.device)
    start = time.perf_counter_ns()
    dist.all_to_all_single(got, sent, splits, splits, group=group)
    _synchronise(sent.device)
    return (time.perf_counter_ns() - start) / 1e9


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
