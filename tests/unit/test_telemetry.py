"""Sampling on this machine, and the tags that readings give a trial."""

from __future__ import annotations

import time

import pytest

from ep_ray.nvml import Nvml, reason_words
from ep_ray.telemetry import Reading, Sampler, tags


def gpu_readings(
    clocks: list[float], busy: list[float], reasons: list[int], gpu: str = "gpu0"
) -> list[Reading]:
    return [
        Reading(stamp, "node", gpu, name, value)
        for stamp, values in enumerate(zip(clocks, busy, reasons, strict=True))
        for name, value in zip(
            ("sm_clock_mhz", "utilisation_pct", "throttle_reasons"), map(float, values), strict=True
        )
    ]


def test_steady_gpu_has_no_tag() -> None:
    assert tags(gpu_readings([345, 1200, 1980, 1975, 1980], [0, 50, 100, 100, 100], [1] * 5)) == []


def test_clock_change_at_work_is_tagged() -> None:
    found = tags(gpu_readings([1980, 1980, 1980, 1800], [100] * 4, [0] * 4))
    assert found == ["sm_clock_changed: 1980 to 1800 MHz on node gpu0"]


@pytest.mark.parametrize(("last", "tagged"), [(1882.0, False), (1880.0, True)])
def test_five_percent_is_the_limit(last: float, tagged: bool) -> None:
    assert bool(tags(gpu_readings([1980, 1980, last], [100] * 3, [0] * 3))) is tagged


def test_any_reason_but_idle_is_tagged() -> None:
    found = tags(gpu_readings([1980] * 3, [100] * 3, [0x1, 0x4, 0x40]))
    assert found == [
        "throttled: sw_power_cap on node gpu0",
        "throttled: hw_thermal_slowdown on node gpu0",
    ]
    assert reason_words(0x1) == []


def test_each_gpu_is_judged_alone() -> None:
    calm = gpu_readings([1980] * 3, [100] * 3, [0] * 3, "gpu0")
    hot = gpu_readings([1500] * 3, [100] * 3, [0x20] * 3, "gpu1")
    assert tags(calm + hot) == ["throttled: sw_thermal_slowdown on node gpu1"]


def test_no_gpu_no_tag() -> None:
    assert tags([Reading(0, "node", "cpu", "load_1min", 9.0)]) == []


def test_sampler_reads_at_begin_and_end_and_in_between() -> None:
    sampler = Sampler(period_s=0.01)
    sampler.begin()
    deadline = time.monotonic() + 30
    while len({r.unix_ns for r in sampler._readings}) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watched = sampler.end()
    stamps = [r.unix_ns for r in watched.readings]
    assert stamps == sorted(stamps)
    assert len(set(stamps)) >= 4
    assert {r.name for r in watched.readings} >= {"load_1min", "rx_bytes"}
    assert watched.grown["net/lo/rx_bytes"] >= 0
    count = len(watched.readings)
    time.sleep(0.05)
    assert len(watched.readings) == count  # nothing is sampled after the end


def test_a_second_begin_drops_the_first_watch() -> None:
    sampler = Sampler(period_s=100)
    sampler.begin()
    first = sampler._readings
    sampler.begin()
    assert sampler.end().readings is not first


class Answer:
    def __init__(self, value: int, code: int) -> None:
        self.value, self.nvmlReturn = self, code
        self.ullVal = value


class Library:
    """The driver library's bindings, for machines without a driver."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_SUCCESS = 1, 2, 0, 0
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    class NVMLError(Exception):
        pass

    class Memory:
        used = 3 * 2**20

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetClockInfo(self, gpu: int, clock: int) -> int:  # noqa: N802
        return 1980 if clock == 1 else 3201

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:  # noqa: N802
        return 123_400

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:  # noqa: N802
        return 41

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:  # noqa: N802
        return 4

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> None:  # noqa: N802
        raise self.NVMLError  # as a partitioned GPU answers

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Memory:  # noqa: N802
        return self.Memory()

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[tuple[int, int]]) -> list[Answer]:  # noqa: N802
        (field, scope), *_ = fields
        assert scope == 0xFFFFFFFF
        return [Answer(field, 0 if gpu == 0 else 3)]


def test_gpu_readings_are_converted_and_missing_ones_left_out() -> None:
    found = {(gpu, name): value for gpu, name, value in Nvml(Library()).readings()}
    assert found["gpu1", "power_w"] == 123.4
    assert found["gpu0", "sm_clock_mhz"] == 1980
    assert found["gpu0", "memory_used_mib"] == 3
    assert ("gpu0", "utilisation_pct") not in found


def test_nvlink_counters_are_bytes_and_only_where_supported() -> None:
    assert Nvml(Library()).nvlink_bytes() == {
        "nvlink/gpu0/tx_bytes": 138 * 1024,
        "nvlink/gpu0/rx_bytes": 139 * 1024,
    }
