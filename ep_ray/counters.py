"""Byte counters of network ports, as the kernel keeps them: what carried the traffic.

| name                                   | file                                              |
|----------------------------------------|---------------------------------------------------|
| `net/eth0/rx_bytes`                    | `net/eth0/statistics/rx_bytes`                    |
| `ib/mlx5_0-1/rx_bytes`                 | `infiniband/mlx5_0/ports/1/counters/port_rcv_data`|
| `efa/rdmap0-1/rdma_read_bytes`         | `infiniband/rdmap0/ports/1/hw_counters/...`       |
| `nvlink/gpu0/rx_bytes`                 | none: read through the driver (`ep_ray.nvml`)     |

All are bytes since boot, also where the file counts words of four.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ep_ray.config.schema import TransportKind

SYSFS = Path("/sys/class")
LOOPBACK = "lo"
_IB_WORD = 4
_IB_FILES = {"rx_bytes": "port_rcv_data", "tx_bytes": "port_xmit_data"}
_EFA_FILES = ("rx_bytes", "tx_bytes", "rdma_read_bytes", "rdma_write_bytes")
_EFA_DRIVER = "efa"


def read_counters(sysfs: Path = SYSFS) -> dict[str, int]:
    """Counters of every port of this machine; a file that cannot be read is left out."""
    return dict([*_interfaces(sysfs), *_rdma(sysfs)])


def _interfaces(sysfs: Path) -> Iterator[tuple[str, int]]:
    for interface in sorted((sysfs / "net").glob("*")):
        for word in ("rx_bytes", "tx_bytes"):
            yield from _entry(
                f"net/{interface.name}/{word}", interface / "statistics" / word, unit=1
            )


def _rdma(sysfs: Path) -> Iterator[tuple[str, int]]:
    for port in sorted((sysfs / "infiniband").glob("*/ports/*")):
        device = port.parents[1]
        where = f"{device.name}-{port.name}"
        if (device / "device" / "driver").resolve().name == _EFA_DRIVER:
            for word in _EFA_FILES:
                yield from _entry(f"efa/{where}/{word}", port / "hw_counters" / word, unit=1)
        else:
            for word, file in _IB_FILES.items():
                yield from _entry(f"ib/{where}/{word}", port / "counters" / file, _IB_WORD)


def _entry(name: str, file: Path, unit: int) -> Iterator[tuple[str, int]]:
    try:
        yield name, int(file.read_text()) * unit
    except (OSError, ValueError):
        return


def growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """How far the counters grew that both readings have; one that was reset counts from zero."""
    return {
        name: value - before[name] if value >= before[name] else value
        for name, value in after.items()
        if name in before
    }


def carried_bytes(grown: Mapping[str, int], kind: TransportKind) -> int | None:
    """Bytes that the ports of a transport moved; None where there is no such port to read.

    Each byte counts once. Bridges and virtual interfaces count a byte again, so that `tcp` is
    loopback plus the busiest other interface. Of EFA's counters, which overlap, the largest
    sum counts: received, sent, or moved by RDMA on either side's initiative.
    """
    if kind is TransportKind.tcp:
        received = _of(grown, "net", ("rx_bytes",))
        others = [total for name, total in received.items() if name != LOOPBACK]
        return received.get(LOOPBACK, 0) + max(others, default=0) if received else None
    if kind is TransportKind.efa:
        words: Iterable[tuple[str, ...]] = (
            ("rx_bytes",),
            ("tx_bytes",),
            ("rdma_read_bytes", "rdma_write_bytes"),
        )
        sums = [_of(grown, "efa", word) for word in words]
        return max((sum(found.values()) for found in sums if found), default=None)
    received = _of(grown, kind.name, ("rx_bytes",))
    return sum(received.values()) if received else None


def _of(grown: Mapping[str, int], family: str, words: tuple[str, ...]) -> dict[str, int]:
    """Sums by port over the counters with these last words."""
    sums: dict[str, int] = {}
    for name, value in grown.items():
        group, port, word = name.split("/")
        if group == family and word in words:
            sums[port] = sums.get(port, 0) + value
    return sums
