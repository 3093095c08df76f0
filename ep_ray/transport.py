"""Asks for a transport through the environment, and proves which one carried the traffic."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ep_ray.config.schema import Transport, TransportKind

NETWORKS = (TransportKind.tcp, TransportKind.ib, TransportKind.efa)

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
    """One piece of evidence about what carried traffic; a row of the `transport` table."""

    rank: int
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
        env["NCCL_HOSTID"] = group
    if one_node:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if transport.interface:
        env |= {
            "NCCL_SOCKET_IFNAME": transport.interface,
            "GLOO_SOCKET_IFNAME": transport.interface,
        }
    return env | dict(transport.env)


def evidence_in_log(rank: int, lines: Iterable[str]) -> list[Evidence]:
    """What NCCL says about its channels, one entry per distinct statement."""
    found: dict[str, str | None] = {}
    for line in lines:
        for match in _CHANNEL.finditer(line):
            found.setdefault(f"via {match.group(1)}", _transport_of(match.group(1)))
        network = _NETWORK.search(line)
        if network:
            found.setdefault(f"Using network {network.group(1).strip()}", None)
    return [Evidence(rank, "log", text, kind) for text, kind in found.items()]


def _transport_of(channel: str) -> str:
    name = channel.upper()
    if name.startswith("P2P"):
        return TransportKind.nvlink.name
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
        seen: Evidence of all ranks.
        local_links: Whether faster links inside a TP group are part of the arm.

    Returns:
        (status, transports seen): `proved`, `contradicted`, `unproved`, or `observed` where
        nothing was asked for.
    """
    kinds = {e.transport for e in seen if e.transport}
    words = "+".join(sorted(kinds))
    if asked is TransportKind.auto:
        return "observed", words
    if not kinds:
        return "unproved", words
    tolerated = {asked.name}
    if local_links and asked in NETWORKS:
        tolerated |= {TransportKind.nvlink.name, TransportKind.shm.name}
    if asked.name in kinds and kinds <= tolerated:
        return "proved", words
    return "contradicted", words


def interface_bytes(path: str = "/proc/net/dev") -> dict[str, int]:
    """Bytes received per network interface since boot (loopback counts each byte once)."""
    counters: dict[str, int] = {}
    for line in Path(path).read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        counters[name.strip()] = int(numbers.split()[0])
    return counters


def interface_evidence(
    rank: int, before: Mapping[str, int], after: Mapping[str, int], expected_bytes: int
) -> Evidence:
    """Whether the busiest interface carried at least the expected bytes: a socket transport."""
    growth = {name: after[name] - before.get(name, 0) for name in after}
    name = max(growth, key=lambda k: growth[k])
    carried = growth[name] >= expected_bytes > 0
    return Evidence(
        rank,
        "interface",
        f"{name} received {growth[name]:,} bytes; the collective sends {expected_bytes:,}",
        TransportKind.tcp.name if carried else None,
        growth[name],
        expected_bytes,
    )
