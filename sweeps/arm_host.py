"""An arm whose engines ep-ray starts: ranks, router and load client, up between cells."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ep_ray.address import is_one_node, service_ip
from ep_ray.config.schema import Config, DeviceKind, RouterPolicy
from ep_ray.interrupt import uninterrupted
from ep_ray.inventory import local_machine, versions
from ep_ray.layout import gpus_per_server, servers
from ep_ray.placement import find_slots, in_bundle, release, reserve
from ep_ray.transport import Evidence, evidence_in_log, server_envs
from ep_ray.watchdog import TrialError
from serving.deploy import deploy
from serving.engine import Launch, Seat, plan_launches
from serving.expert_bytes import expert_bytes, model_config, moe_layers
from serving.group import EngineGroup, GroupError
from serving.load.prompts import CallSpec
from serving.load.records import CellRecord, Request
from serving.models import ResolvedModel
from serving.ports import (
    PortError,
    check_free,
    check_map,
    ephemeral_range,
    port_map,
    router_claims,
)
from sweeps.call import call_spec
from sweeps.front import Front
from sweeps.host import Counts
from sweeps.outcome import status_rows, what_ran
from sweeps.trial import ServingTrial

_COUNTERS_S = 30.0
_TOKEN_S = 30.0
_LOG_LINES = 10  # of each engine, in the reason of a cell that timed out


class ArmHost:
    """One deployed arm; implements `sweeps.host.Host`.

    Args:
        config: The experiment.
        trial: Any trial of the deployment.
        routers: Policies that its trials ask for.
        model: The model that its engines serve.
        device: `cpu` or `cuda`.
        folder: The sweep's folder; logs go to `logs/` in it.
    """

    def __init__(
        self,
        config: Config,
        trial: ServingTrial,
        routers: Collection[RouterPolicy],
        model: ResolvedModel,
        device: DeviceKind,
        folder: Path,
    ) -> None:
        self._config = config
        self._arm = trial.layout
        self._trial = trial
        self._model = model
        self._device = device
        self._logs = folder / "logs"
        self._placement: Any = None
        self._group: EngineGroup | None = None
        self._policies = set(routers) - {RouterPolicy.none}
        self._front: Front | None = None
        self._fronts = 0

    def endpoints(self) -> list[str]:
        """Names of the ranks, in rank order."""
        return [endpoint.name for endpoint in self._up.endpoints]

    def rank_urls(self) -> list[tuple[str, str]]:
        """Name and base URL of each rank, in rank order."""
        return [(endpoint.name, endpoint.url) for endpoint in self._up.endpoints]

    @property
    def _up(self) -> EngineGroup:
        assert self._group is not None, "the arm is not up"
        return self._group

    def start(self) -> None:
        """Brings the arm up.

        Raises:
            TrialError: It did not come up; nothing of it is left, or the message says what.
        """
        try:
            self._deploy()
            self._start_front()
        except BaseException as error:
            with uninterrupted():
                left = self.close()
            if isinstance(error, GroupError | PortError | ValueError):
                status = _status(error) if isinstance(error, GroupError) else "failed"
                raise TrialError(status, "\n".join([str(error), *left])) from error
            raise

    def _deploy(self) -> None:
        arm, deadlines = self._arm, self._config.deadlines
        ranks = servers(arm)
        gpus = gpus_per_server(arm) if self._device is DeviceKind.cuda else 0
        share = gpus / self._config.cluster.ranks_per_gpu
        bundle: dict[str, float] = {"CPU": 1, **({"GPU": share} if gpus else {})}
        name = f"ep_ray:{arm.name}"
        timeout_s = self._config.cluster.placement_timeout_s
        self._placement = reserve([bundle] * ranks, name, timeout_s)
        slots = find_slots(self._placement, ranks, share, deadlines.actor_start_s)
        seats = [
            Seat(slot.node_ip, slot.gpu_ids, in_bundle(self._placement, slot.bundle, share))
            for slot in slots
        ]
        launches = self._launches(seats)
        self._check_ports([seat.node_ip for seat in seats])
        self._group = deploy(
            launches, seats, str(self._logs), arm.startup_timeout_s, deadlines.actor_start_s
        )

    def _launches(self, seats: Sequence[Seat]) -> list[Launch]:
        transport = self._trial.transport
        envs = server_envs(transport, len(seats), is_one_node())
        cpus = sorted(os.sched_getaffinity(0)) if self._device is DeviceKind.cpu else None
        config = self._config.model
        return plan_launches(
            self._arm, self._model, config.load_format, config.dtype, seats, envs, cpus
        )

    def _check_ports(self, node_ips: Sequence[str]) -> None:
        here = service_ip()
        policies = {policy.name for policy in self._policies}
        routers = router_claims(here, self._config.router.port, policies)
        claims = port_map(self._arm, node_ips, routers)
        check_map(claims, ephemeral_range())
        check_free([claim for claim in claims if claim.node_ip == here])

    def _start_front(self) -> None:
        self._fronts += 1
        arm = self._arm
        name = arm.name + (f":{self._fronts}" if self._fronts > 1 else "")
        endpoints = self.rank_urls()
        parallelism = {"kind": arm.kind.name, "tp": arm.tp, "dp": arm.dp, "ep": arm.enable_ep}
        self._front = Front(self._config, name, self._policies, endpoints, parallelism, self._logs)

    def call(self, trial: ServingTrial) -> CallSpec:
        """What is asked of it; token ids come from the model's own vocabulary."""
        return call_spec(self._config, trial, self._model.name, self._model.vocab_size)

    def send(self, trial: ServingTrial, requests: Sequence[Request]) -> CellRecord:
        """Sends a cell's load.

        Raises:
            TrialError: A rank, the router or the client died, or the deadline passed.
        """
        assert self._front is not None
        try:
            return self._front.send(trial, requests, self._check_alive)
        except TrialError as error:
            if error.status == "timeout":
                tails = self._up.log_tails(_LOG_LINES)
                error.reason += "".join(f"\nThe end of {n}'s log:\n{t}" for n, t in tails.items())
            raise

    def _check_alive(self) -> None:
        try:
            self._up.check_alive()
        except GroupError as error:
            raise TrialError(_status(error), str(error)) from error
        if self._front is not None:
            self._front.check_alive()

    def standing(self, trial: ServingTrial) -> list[dict[str, Any]]:
        """What the router says of each rank, and whether it generates a token when asked itself.

        Raises:
            TrialError: The router is gone.
        """
        assert self._front is not None
        return status_rows(self._front.status(trial), self._up.probe(_TOKEN_S))

    def mend(self) -> None:
        """Replaces router and client if every rank still generates a token: engines are dear.

        Raises:
            TrialError: A rank does not serve, or router or client do not come up.
        """
        self._close_front()
        try:
            self._up.check_serving(_TOKEN_S)
        except GroupError as error:
            raise TrialError(_status(error), str(error)) from error
        self._start_front()

    def counts(self, trial: ServingTrial) -> Counts:
        """Running counters of the trial's router and the engines' settled ones."""
        assert self._front is not None
        try:
            engines = self._up.counters(_COUNTERS_S)
        except GroupError as error:
            raise TrialError(_status(error), f"engine counters: {error}") from error
        return Counts(self._front.counters(trial), engines)

    def evidence(self) -> list[Evidence]:
        """NCCL's statements in the ranks' logs, wherever they lie.

        Raises:
            TrialError: A rank is gone.
        """
        try:
            logs = self._up.nccl_lines()
        except GroupError as error:
            raise TrialError("crash", f"the ranks' logs: {error}") from error
        return [e for rank, lines in enumerate(logs) for e in evidence_in_log(rank, lines)]

    def expert_bytes(self, record: CellRecord) -> int | None:
        """The least that the experts of a cell's complete requests sent between ranks."""
        complete = [request for request in record.requests if request.state == "complete"]
        return expert_bytes(self._arm, Path(self._model.path), complete)

    def what_ran(self) -> dict[str, Any]:
        """Versions, hardware, each server's real environment, and why the group restarted."""
        facts = {fact.name: fact for fact in self._up.facts()}
        machine = local_machine()
        on_gpu = self._device is DeviceKind.cuda and machine.gpus
        routers = self._front.versions() if self._front is not None else {}
        found = what_ran(
            versions()
            | routers
            | {"vllm": next(iter(facts.values())).vllm_version, "model": self._model.revision},
            {"machines": {machine.hostname: machine.as_dict()}},
            {name: fact.environment for name, fact in facts.items()},
            machine.gpus[0].name if on_gpu else machine.cpu,
        )
        layers = moe_layers(model_config(Path(self._model.path))) if self._model.experts else None
        return found | {"restarted_for": self._up.restarted_for, "moe_layers": layers}

    def close(self) -> list[str]:
        """Ends everything of the arm. Returns what is left, in words."""
        self._close_front()
        grace_s = self._config.deadlines.teardown_s
        left = self._group.stop(grace_s) if self._group is not None else []
        release(self._placement)
        self._group = self._placement = None
        return left

    def _close_front(self) -> None:
        if self._front is not None:
            self._front.close()
        self._front = None


def _status(error: GroupError) -> str:
    return "timeout" if error.timed_out else "crash"
