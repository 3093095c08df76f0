"""Port counters, from a sysfs tree laid out as Linux does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ep_ray.config.schema import TransportKind
from ep_ray.counters import carried_bytes, growth, read_counters


def write(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for name, rx in (("lo", 1000), ("eth0", 2000), ("docker0", 1500)):
        write(tmp_path / "net" / name / "statistics" / "rx_bytes", rx)
        write(tmp_path / "net" / name / "statistics" / "tx_bytes", rx + 1)
    mlx = tmp_path / "infiniband" / "mlx5_0"
    write(mlx / "ports" / "1" / "counters" / "port_rcv_data", 100)
    write(mlx / "ports" / "1" / "counters" / "port_xmit_data", 50)
    (mlx / "device").mkdir()
    (mlx / "device" / "driver").symlink_to("../../../drivers/mlx5_core")
    efa = tmp_path / "infiniband" / "rdmap0s6"
    for word, value in (("rx_bytes", 70), ("tx_bytes", 80), ("rdma_read_bytes", 60)):
        write(efa / "ports" / "1" / "hw_counters" / word, value)
    write(efa / "ports" / "1" / "hw_counters" / "rdma_write_bytes", 30)
    (efa / "device").mkdir()
    (efa / "device" / "driver").symlink_to("../../../drivers/efa")
    return tmp_path


def test_all_ports_are_read_in_bytes(sysfs: Path) -> None:
    found = read_counters(sysfs)
    assert found["net/lo/rx_bytes"] == 1000
    assert found["net/eth0/tx_bytes"] == 2001
    assert found["ib/mlx5_0-1/rx_bytes"] == 400  # words of four bytes
    assert found["ib/mlx5_0-1/tx_bytes"] == 200
    assert found["efa/rdmap0s6-1/rdma_read_bytes"] == 60
    assert not [name for name in found if name.startswith("ib/rdmap")]


def test_an_unreadable_counter_is_left_out(sysfs: Path) -> None:
    (sysfs / "net" / "eth0" / "statistics" / "rx_bytes").write_text("")
    found = read_counters(sysfs)
    assert "net/eth0/rx_bytes" not in found
    assert "net/eth0/tx_bytes" in found


def test_this_machine_has_loopback() -> None:
    assert read_counters()["net/lo/rx_bytes"] >= 0


def test_growth_needs_both_readings_and_survives_a_reset() -> None:
    before = {"net/lo/rx_bytes": 10, "net/gone/rx_bytes": 1, "ib/x-1/rx_bytes": 900}
    after = {"net/lo/rx_bytes": 25, "net/new/rx_bytes": 7, "ib/x-1/rx_bytes": 40}
    assert growth(before, after) == {"net/lo/rx_bytes": 15, "ib/x-1/rx_bytes": 40}


def test_carried_bytes_count_each_byte_once(sysfs: Path) -> None:
    grown = read_counters(sysfs)
    assert carried_bytes(grown, TransportKind.tcp) == 1000 + 2000  # not the bridge's again
    assert carried_bytes(grown, TransportKind.ib) == 400
    assert carried_bytes(grown, TransportKind.efa) == 90  # read + write exceed rx and tx


def test_no_such_port_is_not_zero_bytes() -> None:
    only_lo = {"net/lo/rx_bytes": 5}
    assert carried_bytes(only_lo, TransportKind.tcp) == 5
    for kind in (TransportKind.ib, TransportKind.efa, TransportKind.nvlink):
        assert carried_bytes(only_lo, kind) is None
