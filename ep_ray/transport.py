"""Asks for a transport through the environment, and judges what was seen of it.

Evidence comes from NCCL's own log lines (here) and from byte counters and the GPUs' links
(`ep_ray.proof`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ep_ray.config.schema import Transport, TransportKind

NETWORKS = (TransportKind.tcp, TransportKind.ib, TransportKind.efa)
PEER = "p2p"
"""GPUs that reach each other's memory, over NVLink or PCIe: NCCL's log does not say which."""
LOG, COUNTERS, LINKS = "log", "counters", "links"

_ASK: dict[TransportKind, dict[str, str]] = {
    TransportKind.auto: {},
    TransportKind.nvlink: {"NCCL_P2P_LEVEL": "NVL"},
    TransportKind.shm: {"NCCL_P2P_DISABLE": "1"},
    TransportKind.tcp: {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"},
    TransportKind.ib: {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "0"},
    TransportKind.efa: {"FI_PROVIDER": "efa"},
}

# NCCL's own log lines about a channel, and what they prove.
_CHANNEL = re.compile(r"via (P2P/\S+|SHM\S*|NET/(?:AWS )?[^\s/]+\S*)", re.IGNORECASE)
_NETWORK = re.compile(r"Using network (\S.*)")


@dataclass(frozen=True)
class Evidence:
    """One piece of evidence about what carried traffic; a row of the `transport` table.

    Attributes:
        rank: Whose it is; None for a machine or the whole cluster.
        source: `log`, `counters` or `links`.
        evidence: What was seen, in words.
        transport: What it shows; None where it shows none.
        bytes_seen: What counters grew by.
        bytes_expected: The least that they had to grow by.
    """

    rank: int | None
    source: str
    evidence: str
    transport: str | None
    bytes_seen: int | None = None
    bytes_expected: int | None = None


def transport_env(transport: Transport, group: str, one_node: bool) -> dict[str, str]:
    """Environment that asks NCCL and gloo for a transport.

    Args:
        transport: What is asked for.
        group: Ranks with the same group keep their fast local links. NCCL takes ranks of
            other groups for other hosts, so that `tcp` or `ib` also works on one machine.
        one_node: Whether the cluster is a single machine: gloo then stays on loopback.

    Returns:
        Variables; those of `transport.env` win.
    """
    # NVLS slots run out or hang (nccl#2077), and logs are the proof of what was used.
    env = {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
    env |= _ASK[transport.kind]
    if transport.kind in NETWORKS:
        # Racks whose NVLink spans hosts would see through the different host ids.
        env |= {"NCCL_HOSTID": group, "NCCL_MNNVL_ENABLE": "0"}
    if one_node:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if transport.interface:
        env |= {
            "NCCL_SOCKET_IFNAME": transport.interface,
            "GLOO_SOCKET_IFNAME": transport.interface,
        }
    return env | dict(transport.env)


def server_envs(transport: Transport, servers: int, one_node: bool) -> list[dict[str, str]]:
    """`transport_env` of each server of an arm, every server a group of its own.

    NVLink stays inside a server's TP group. Between servers the network is used, on one machine
    too, as between the pods of the published study.
    """
    return [transport_env(transport, f"ep-ray-tp{s}", one_node) for s in range(servers)]


def evidence_in_log(rank: int, lines: Iterable[str]) -> list[Evidence]:
    """What NCCL says about its channels, one entry per distinct statement."""
    found: dict[str, str | None] = {}
    for line in lines:
        for match in _CHANNEL.finditer(line):
            found.setdefault(f"via {match.group(1)}", _transport_of(match.group(1)))
        network = _NETWORK.search(line)
        if network:
            found.setdefault(f"Using network {network.group(1).strip()}", None)
    return [Evidence(rank, LOG, text, kind) for text, kind in found.items()]


def _transport_of(channel: str) -> str:
    name = channel.upper()
    if name.startswith("P2P"):
        return PEER
    if name.startswith("SHM"):
        return TransportKind.shm.name
    for word, kind in (("NET/SOCKET", "tcp"), ("NET/IB", "ib"), ("LIBFABRIC", "efa")):
        if word in name:
            return kind
    return "/".join(channel.split("/")[:2])  # a network that is none of ours, by NCCL's name


def judge(asked: TransportKind, seen: Iterable[Evidence], local_links: bool) -> tuple[str, str]:
    """Compares what was asked for with what was seen.

    Args:
        asked: The transport of the arm.
        seen: Evidence of all ranks and machines.
        local_links: Whether faster links inside a TP group are part of the arm.

    Returns:
        (status, transports seen). `contradicted`: another transport carried traffic.
        `unproved`: nothing shows the one asked for, or the ports of the network asked for
        carried less than they must have. `observed`: nothing was asked for. Else `proved`.
    """
    evidence = list(seen)
    kinds = {e.transport for e in evidence if e.transport}
    words = "+".join(sorted(kinds - ({PEER} if TransportKind.nvlink.name in kinds else set())))
    if asked is TransportKind.auto:
        return "observed", words
    own = {asked.name, PEER} if asked is TransportKind.nvlink else {asked.name}
    local = {TransportKind.nvlink.name, TransportKind.shm.name, PEER}
    tolerated = own | (local if local_links and asked in NETWORKS else set())
    if kinds and (not kinds <= tolerated or not kinds & own):
        return "contradicted", words
    short = asked in NETWORKS and any(e.bytes_expected and not e.transport for e in evidence)
    return "proved" if asked.name in kinds and not short else "unproved", words
