"""Runs the serving cells of one arm: engines, router and load client stay up between them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from serving.load.actor import LoadClient
from serving.router.actor import RouterActor

from ep_ray.address import is_one_node, service_ip
from ep_ray.config.schema import Config, DeviceKind, RouterPolicy
from ep_ray.placement import find_slots, in_bundle, release, reserve
from ep_ray.session import Session
from ep_ray.transport import transport_env
from ep_ray.watchdog import TrialError, wait_all
from serving.engine import Launch, Seat, plan_launches
from serving.engine_http import Counters
from serving.group import EngineGroup, GroupError, deploy
from serving.load.records import CellRecord, Request
from serving.load.target import Target
from serving.models import ResolvedModel
from serving.ports import PortError, check_free, check_map, ephemeral_range, port_map
from sweeps.plan import ServingTrial

_POLL_S = 1.0
_COUNTERS_S = 30.0
_CALL_S = 30.0


@dataclass(frozen=True)
class Served:
    """What a cell left behind at client, router and engines."""

    record: CellRecord
    router: Mapping[str, Any] | None
    engines: dict[str, Counters] | None


class ArmHost:
    """One deployed arm.

    Args:
        config: The experiment.
        trial: Any trial of the arm.
        model: The model that its engines serve.
        session: Where it runs.
        device: `cpu` or `cuda`.
        folder: The sweep's folder; logs go to `logs/` in it.
    """

    def __init__(
        self,
        config: Config,
        trial: ServingTrial,
        model: ResolvedModel,
        session: Session,
        device: DeviceKind,
        folder: Path,
    ) -> None:
        self._config = config
        self._arm = trial.layout
        self._trial = trial
        self._model = model
        self._session = session
        self._device = device
        self._logs = folder / "logs"
        self._placement: Any = None
        self._group: EngineGroup | None = None
        self._router: Any = None
        self._client: Any = None
        self._url = ""
        self.calibrated = False

    @property
    def endpoints(self) -> list[str]:
        """Names of the ranks, in rank order."""
        assert self._group is not None
        return [endpoint.name for endpoint in self._group.endpoints]

    @property
    def log_paths(self) -> list[Path]:
        """Each rank's log, where this machine has it."""
        assert self._group is not None
        names = [launch.name.replace(":", "-") for launch in self._group.launches]
        return [self._logs / f"{name}.log" for name in names]

    def start(self) -> None:
        """Brings the arm up.

        Raises:
            TrialError: It did not come up; nothing of it is left, or the message says what.
        """
        try:
            self._deploy()
            assert self._group is not None
            self._url = self._group.endpoints[0].url
            if self._trial.router is not RouterPolicy.none:
                self._start_router()
            self._client = LoadClient.options(name=f"client:{self._arm.name}", num_cpus=0).remote()
            wait_all([self._client.ping.remote()], _CALL_S, "start of the load client")
        except BaseException as error:
            left = self.close()
            if isinstance(error, GroupError | PortError | ValueError):
                status = "timeout" if getattr(error, "timed_out", False) else "crash"
                raise TrialError(status, "\n".join([str(error), *left])) from error
            raise

    def _deploy(self) -> None:
        arm, deadlines = self._arm, self._config.deadlines
        ranks = self._trial.layout.dp
        gpus = arm.tp if self._device is DeviceKind.cuda else 0
        bundle: dict[str, float] = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
        name = f"ep_ray:{arm.name}"
        timeout_s = self._config.cluster.placement_timeout_s
        self._placement = reserve([bundle] * ranks, name, timeout_s)
        slots = find_slots(self._placement, ranks, gpus, deadlines.actor_start_s)
        seats = [
            Seat(slot.node_ip, slot.gpu_ids, in_bundle(self._placement, slot.bundle, gpus))
            for slot in slots
        ]
        launches = self._launches(seats)
        self._check_ports([seat.node_ip for seat in seats])
        self._group = deploy(
            launches, seats, str(self._logs), arm.startup_timeout_s, deadlines.actor_start_s
        )

    def _launches(self, seats: Sequence[Seat]) -> list[Launch]:
        transport = self._trial.transport
        # One group per TP group: NVLink stays inside it, whatever is between the groups.
        one_node = is_one_node()
        envs = [transport_env(transport, f"ep-ray-tp{r}", one_node) for r in range(len(seats))]
        cpus = sorted(os.sched_getaffinity(0)) if self._device is DeviceKind.cpu else None
        config = self._config.model
        return plan_launches(
            self._arm, self._model, config.load_format, config.dtype, seats, envs, cpus
        )

    def _check_ports(self, node_ips: Sequence[str]) -> None:
        router = self._config.router
        routed = self._trial.router is not RouterPolicy.none
        claims = port_map(self._arm, node_ips, self._here if routed else None, router.port)
        check_map(claims, ephemeral_range())
        check_free([claim for claim in claims if claim.node_ip == self._here])

    @property
    def _here(self) -> str:
        return service_ip()

    def _start_router(self) -> None:
        assert self._group is not None
        router = self._config.router
        self._router = RouterActor.options(name=f"router:{self._arm.name}", num_cpus=0).remote(
            f"router:{self._arm.name}", router.host, router.port
        )
        self._url = wait_all([self._router.start.remote()], _CALL_S, "start of the router")[0]
        endpoints = [(endpoint.name, endpoint.url) for endpoint in self._group.endpoints]
        wait_all([self._router.set_endpoints.remote(endpoints)], _CALL_S, "the router's endpoints")

    def serve(self, requests: Sequence[Request], concurrency: int) -> Served:
        """Sends one cell's requests and waits, as long as all ranks live.

        Raises:
            TrialError: A rank, the router or the client died, or the deadline passed.
        """
        assert self._group is not None
        target = Target.parse(self._url, self._config.load.api.name)
        run = self._client.run.remote(
            [target], requests, concurrency, self._config.load.request_timeout_s
        )
        self._watch(run)
        record: CellRecord = wait_all([run], _CALL_S, "the load client")[0]
        return Served(record, self.router_counts(), self.engine_counts())

    def _watch(self, run: Any) -> None:
        assert self._group is not None
        waited = 0.0
        while not ray.wait([run], timeout=_POLL_S)[0]:
            waited += _POLL_S
            try:
                self._group.check_alive()
            except GroupError as error:
                self._client.stop.remote()
                raise TrialError("crash", str(error)) from error
            if waited > self._config.deadlines.trial_s:
                self._client.stop.remote()
                raise TrialError("timeout", f"cell not done within {waited:.0f} s")

    def router_counts(self) -> Mapping[str, Any] | None:
        """The router's running counters, or None without a router."""
        if self._router is None:
            return None
        counts: Mapping[str, Any] = wait_all(
            [self._router.counters.remote()], _CALL_S, "the router's counters"
        )[0]
        return counts

    def engine_counts(self) -> dict[str, Counters] | None:
        """The engines' settled counters."""
        assert self._group is not None
        try:
            return self._group.counters(_COUNTERS_S)
        except GroupError as error:
            raise TrialError("crash", f"engine counters: {error}") from error

    def facts(self) -> dict[str, Any]:
        """Per rank: version, effective environment and command line of the real server."""
        assert self._group is not None
        return {fact.name: fact for fact in self._group.facts()}

    def close(self) -> list[str]:
        """Ends everything of the arm. Returns what is left, in words."""
        grace_s = self._config.deadlines.teardown_s
        if self._client is not None:
            ray.kill(self._client)
        if self._router is not None:
            ray.wait([self._router.stop.remote(1.0)], timeout=_CALL_S)
            ray.kill(self._router)
        left = self._group.stop(grace_s) if self._group is not None else []
        release(self._placement)
        self._client = self._router = self._group = self._placement = None
        return left
