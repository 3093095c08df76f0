"""What the kernel and the driver say of a machine's GPUs and NICs. Nothing here hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ep_ray.nvml import reason_words

_TIMEOUT_S = 20
_QUERY = (
    "index", "driver_version", "clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu",
    "clocks_throttle_reasons.active",
)  # fmt: skip
# CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED of device 0, in a process of its own: the driver's
# initialisation can hang, and must not leave a context here.
_DMABUF = """
import ctypes
cuda, answer = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGetAttribute(ctypes.byref(answer), 124, 0) == 0
print(answer.value)
"""


@dataclass(frozen=True)
class GpuState:
    """A GPU now; figures as `nvidia-smi` prints them, `[N/A]` included.

    Attributes:
        index: Device index.
        driver: Version of the driver.
        sm_clock_mhz: Current SM clock.
        max_sm_clock_mhz: Highest SM clock.
        power_w: Power.
        temperature_c: Temperature.
        throttled: Why clocks are held down, other than for being idle.
    """

    index: int
    driver: str
    sm_clock_mhz: str
    max_sm_clock_mhz: str
    power_w: str
    temperature_c: str
    throttled: tuple[str, ...]


@dataclass(frozen=True)
class NicPort:
    """A port of an RDMA device.

    Attributes:
        device: Its name, for example `mlx5_0`.
        port: Number of the port.
        driver: Kernel driver; `efa` for EFA.
        state: For example `ACTIVE`.
        rate: For example `400 Gb/sec (4X NDR)`.
        link_layer: `InfiniBand` or `Ethernet`.
    """

    device: str
    port: int
    driver: str
    state: str
    rate: str
    link_layer: str


def gpu_states() -> tuple[GpuState, ...]:
    """Clocks, power and throttle reasons; empty without a driver."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    return parse_gpu_states(_run(query))


def parse_gpu_states(text: str) -> tuple[GpuState, ...]:
    """Reads the lines that `nvidia-smi` prints for `gpu_states`."""
    rows = [[word.strip() for word in line.split(",")] for line in text.strip().splitlines()]
    return tuple(_gpu_state(row) for row in rows if len(row) == len(_QUERY))


def _gpu_state(row: list[str]) -> GpuState:
    index, driver, clock, most, power, temperature, bits = row
    return GpuState(int(index), driver, clock, most, power, temperature, _reasons(bits))


def _reasons(bits: str) -> tuple[str, ...]:
    return tuple(reason_words(int(bits, 16))) if bits.startswith("0x") else ()


def nic_ports(sysfs: Path = Path("/sys/class/infiniband")) -> tuple[NicPort, ...]:
    """Ports of all RDMA devices."""
    return tuple(_ports(sysfs))


def _ports(sysfs: Path) -> Iterator[NicPort]:
    for port in sorted(sysfs.glob("*/ports/*")):
        device = port.parents[1]
        yield NicPort(
            device=device.name,
            port=int(port.name),
            driver=(device / "device" / "driver").resolve().name,
            state=_text(port / "state").partition(":")[2].strip(),
            rate=_text(port / "rate"),
            link_layer=_text(port / "link_layer"),
        )


def gpudirect() -> dict[str, bool]:
    """Which ways for a NIC to reach GPU memory are there: modules and the driver's dmabuf."""
    modules = _text(Path("/proc/modules"))
    loaded = {line.split(" ", 1)[0] for line in modules.splitlines()}
    return {
        "nvidia_peermem": "nvidia_peermem" in loaded,
        "gdrdrv": "gdrdrv" in loaded,
        "dmabuf": _run([sys.executable, "-c", _DMABUF]).strip() == "1",
    }


def _run(command: list[str]) -> str:
    """Output of a command; empty if it fails or takes longer than 20 s."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
