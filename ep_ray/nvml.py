"""Reads GPUs through NVIDIA's management library. Absent library or driver: no readings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

_KIB = 1024
_ALL_LINKS = 0xFFFFFFFF
# Bits of the driver's clock event reasons. Idle is no reason to doubt a number.
REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def reason_words(bits: int) -> list[str]:
    """Names of the reasons, other than idle, for which clocks are held down."""
    return [word for bit, word in REASONS.items() if bits & bit]


class Nvml:
    """All GPUs of this machine. Build it with `open_nvml`."""

    def __init__(self, library: Any) -> None:
        self._lib = library
        count = library.nvmlDeviceGetCount()
        self._gpus = [library.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        self._readers: dict[str, Callable[[Any], float]] = {
            "sm_clock_mhz": lambda g: library.nvmlDeviceGetClockInfo(g, library.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda g: library.nvmlDeviceGetClockInfo(g, library.NVML_CLOCK_MEM),
            "power_w": lambda g: library.nvmlDeviceGetPowerUsage(g) / 1e3,
            "temperature_c": lambda g: library.nvmlDeviceGetTemperature(
                g, library.NVML_TEMPERATURE_GPU
            ),
            # The older name is in every version of the bindings and answers on every driver.
            "throttle_reasons": library.nvmlDeviceGetCurrentClocksThrottleReasons,
            "utilisation_pct": lambda g: library.nvmlDeviceGetUtilizationRates(g).gpu,
            "memory_used_mib": lambda g: library.nvmlDeviceGetMemoryInfo(g).used / 2**20,
        }

    def readings(self) -> Iterator[tuple[str, str, float]]:
        """(`gpu0`, name with unit, value) of every GPU; what a GPU cannot tell is left out."""
        for index, gpu in enumerate(self._gpus):
            for name, read in self._readers.items():
                try:
                    yield f"gpu{index}", name, float(read(gpu))
                except self._lib.NVMLError:
                    continue

    def held(self) -> list[tuple[str, float, int]]:
        """(`gpu0`, MiB in use, processes that compute on it) of every GPU that can tell."""
        found = []
        for index, gpu in enumerate(self._gpus):
            try:
                used = self._readers["memory_used_mib"](gpu)
                processes = len(self._lib.nvmlDeviceGetComputeRunningProcesses(gpu))
            except self._lib.NVMLError:
                continue
            found.append((f"gpu{index}", used, processes))
        return found

    def nvlink_bytes(self) -> dict[str, int]:
        """`nvlink/gpu0/rx_bytes` and `tx_bytes`: payload over all links since boot."""
        found: dict[str, int] = {}
        fields = {
            "tx_bytes": self._lib.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
            "rx_bytes": self._lib.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        }
        for index, gpu in enumerate(self._gpus):
            for word, field in fields.items():
                kib = self._field(gpu, field)
                if kib is not None:
                    found[f"nvlink/gpu{index}/{word}"] = kib * _KIB
        return found

    def _field(self, gpu: Any, field: int) -> int | None:
        try:
            answer = self._lib.nvmlDeviceGetFieldValues(gpu, [(field, _ALL_LINKS)])[0]
        except self._lib.NVMLError:
            return None
        return int(answer.value.ullVal) if answer.nvmlReturn == self._lib.NVML_SUCCESS else None


def open_nvml() -> Nvml | None:
    """The library, initialised; None where it or a driver is missing."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        return Nvml(library)
    except library.NVMLError:
        return None
