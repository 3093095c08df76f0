"""Evidence beside NCCL's log: port counters against the bytes that had to cross, and GPU links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ep_ray.config.schema import TransportKind
from ep_ray.counters import carried_bytes
from ep_ray.transport import COUNTERS, LINKS, PEER, Evidence

Grown = Mapping[str, Mapping[str, int]]
"""Growth of port counters by machine and counter."""

_PORTS = {
    TransportKind.tcp: "network interfaces (loopback and the busiest other one)",
    TransportKind.ib: "InfiniBand or RoCE ports",
    TransportKind.efa: "EFA ports",
    TransportKind.nvlink: "NVLinks",
}
# Ports that carry nothing but communication between GPUs: what covers the bytes there has
# carried them. Network interfaces carry much else, and only ever speak for tcp.
_DEDICATED = (TransportKind.ib, TransportKind.efa, TransportKind.nvlink)


def counter_evidence(
    asked: TransportKind, grown: Grown, expected_bytes: int | None, also: str
) -> list[Evidence]:
    """Whether the ports of the transport asked for carried at least the expected bytes.

    Args:
        asked: The transport of the arm; with `auto`, ports that only GPUs use are looked at.
        grown: Growth of every machine's counters around the measurement.
        expected_bytes: The least that must have crossed; None or 0 where it is not known.
        also: What else went over network interfaces meanwhile, in words.

    Returns:
        A row for the transport asked for, one per machine where there are several, and one
        for each other transport whose own ports carried those bytes instead.
    """
    if not expected_bytes:
        return []
    own = _rows(asked, grown, expected_bytes, also)
    if any(e.transport for e in own):
        return own
    others = [kind for kind in _DEDICATED if kind is not asked]
    instead = [e for kind in others for e in _rows(kind, grown, expected_bytes, "")]
    return own + [e for e in instead if e.transport]


def _rows(kind: TransportKind, grown: Grown, expected_bytes: int, also: str) -> list[Evidence]:
    if kind not in _PORTS:
        return []
    carried = {ip: carried_bytes(counters, kind) for ip, counters in grown.items()}
    seen = {ip: found for ip, found in carried.items() if found is not None}
    if not seen:
        return []
    total = sum(seen.values())
    where = "" if len(seen) == 1 else f" of {len(seen)} machines together"
    text = f"bytes at {_PORTS[kind]}{where}, against the least that had to cross"
    if kind is TransportKind.tcp and also:
        text += f"; they also carried {also}"
    shows = kind.name if total >= expected_bytes else None
    each = [
        Evidence(None, COUNTERS, f"bytes at {_PORTS[kind]} of {ip}", None, found)
        for ip, found in (seen.items() if len(seen) > 1 else ())
    ]
    return [Evidence(None, COUNTERS, text, shows, total, expected_bytes), *each]


def link_evidence(
    seen: Sequence[Evidence], envs: Iterable[Mapping[str, str]], linked: bool
) -> list[Evidence]:
    """Whether the peer-to-peer channels of the log are NVLink; empty without such channels.

    Args:
        seen: Evidence of the log.
        envs: Each rank's effective environment.
        linked: Whether NVLink links every pair of GPUs of every machine.
    """
    if not any(e.transport == PEER for e in seen):
        return []
    nvlink = TransportKind.nvlink.name
    if linked:
        text = "NVLink links every pair of GPUs of every machine (nvidia-smi topo -m)"
        return [Evidence(None, LINKS, text, nvlink)]
    levels = {env.get("NCCL_P2P_LEVEL") for env in envs}
    if levels == {"NVL"}:
        text = "NCCL_P2P_LEVEL=NVL: NCCL uses peer-to-peer only where NVLink links the GPUs"
        return [Evidence(None, LINKS, text, nvlink)]
    return []
