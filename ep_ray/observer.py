"""Samplers on every machine of the cluster, driven from the driver around each measurement."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ep_ray.telemetry import Reading, Sampler, Watched
from ep_ray.topology import all_nvlink
from ep_ray.watchdog import TrialError, wait_all

_START_S = 60.0
_CALL_S = 30.0
_log = logging.getLogger(__name__)


class Observer:
    """Watches every machine while something is measured. Losing it never fails a trial.

    Attributes:
        grown: Growth of each machine's port counters over the last watch, by address.
    """

    def __init__(self) -> None:
        self._samplers: dict[str, Any] | None = None
        self._readings: list[Reading] = []
        self.grown: Mapping[str, Mapping[str, int]] = {}
        self._nvlink: bool | None = None

    def start(self) -> None:
        """Starts the samplers and does not wait for them; `watch` would start them too."""
        if self._samplers is None:
            self._samplers = _start()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watches what runs inside. What was watched stays until `take`, also after an error."""
        self.grown, self._readings = {}, []
        begun = self._call("begin")
        try:
            yield
        finally:
            if begun:
                self._keep(self._call("end"))

    def take(self) -> list[Reading]:
        """Readings of the last watch; they are handed out once."""
        readings, self._readings = self._readings, []
        return readings

    def linked_by_nvlink(self) -> bool:
        """Whether NVLink links every pair of GPUs of every machine that has GPUs."""
        if self._nvlink is None:
            matrices = [matrix for matrix in self._call("topology").values() if matrix]
            self._nvlink = bool(matrices) and all(map(all_nvlink, matrices))
        return self._nvlink

    def held(self) -> list[tuple[str, list[tuple[str, float, int]]]]:
        """Each machine's name and what its GPUs hold now: GPU, MiB in use, processes."""
        return list(self._call("held").values())

    def close(self) -> None:
        """Ends the samplers."""
        for sampler in (self._samplers or {}).values():
            ray.kill(sampler)
        self._samplers = None

    def _keep(self, watched: Mapping[str, Watched]) -> None:
        self.grown = {ip: seen.grown for ip, seen in watched.items()}
        self._readings = [reading for seen in watched.values() for reading in seen.readings]

    def _call(self, method: str) -> dict[str, Any]:
        """Answers by machine; empty, with a warning, once a sampler does not answer."""
        self.start()
        assert self._samplers is not None
        refs = [getattr(sampler, method).remote() for sampler in self._samplers.values()]
        try:
            answers = wait_all(refs, _CALL_S, f"telemetry ({method})")
        except (TrialError, RayError) as error:
            _log.warning("no telemetry from here on, and no byte counters: %s", error)
            self.close()
            self._samplers = {}
            return {}
        return dict(zip(self._samplers, answers, strict=True))


def _start() -> dict[str, Any]:
    """One sampler per machine: several nodes of a test share an address and its counters."""
    nodes = {n["NodeManagerAddress"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}
    actor = ray.remote(max_restarts=0)(Sampler)
    return {
        ip: actor.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote()
        for ip, node_id in nodes.items()
    }
