"""A block of serving cells of one arm: brought up once, measured cell by cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from ep_ray.config.schema import Config, DeviceKind
from ep_ray.inventory import local_machine, versions
from ep_ray.session import Session
from ep_ray.transport import evidence_in_log, interface_bytes, judge
from ep_ray.watchdog import TrialError
from serving.load.prompts import CallSpec
from serving.models import ResolvedModel, resolve
from sweeps.arm_host import ArmHost, Served
from sweeps.outcome import Outcome, evidence_rows, what_ran
from sweeps.plan import ServingTrial
from sweeps.serving_trial import ledger_of_cell, outcome_of_cell, requests_of_cell

MODEL_CACHE = Path("~/.cache/ep_ray/models").expanduser()
_RESTARTS = 2  # of an arm whose ranks died in the middle of a block


class EngineBlock:
    """Cells of an arm whose engines ep-ray starts.

    Engines stay up for all cells. An arm that does not come up fails the rest of its block at
    once; one that dies in the middle is started again for the next cell, at most twice.
    """

    def __init__(
        self,
        config: Config,
        first: ServingTrial,
        session: Session,
        device: DeviceKind,
        folder: Path,
    ) -> None:
        self._config = config
        self._model: ResolvedModel = resolve(config.model, MODEL_CACHE)
        self._make = lambda: ArmHost(config, first, self._model, session, device, folder)
        self._device = device
        self._host: ArmHost | None = None
        self._starts = 0
        self._hopeless: TrialError | None = None
        self._calibrated = False
        self._ran: dict[str, Any] = {}

    def run(self, trial: ServingTrial) -> Outcome:
        """Runs one cell.

        Raises:
            TrialError: The arm did not come up, died, or missed a deadline.
        """
        host = self._ready()
        try:
            return self._cell(trial, host)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Ends the arm."""
        left = self._end()
        if left:
            print(f"ep-ray: left behind: {'; '.join(left)}")

    def _ready(self) -> ArmHost:
        if self._hopeless is not None:
            raise TrialError(self._hopeless.status, f"the arm is down: {self._hopeless.reason}")
        if self._host is None:
            host = self._make()
            self._starts += 1
            try:
                host.start()
                self._ran = self._what_ran(host)
            except TrialError as error:
                self._hopeless = error
                raise
            self._host = host
        return self._host

    def _end(self) -> list[str]:
        if self._host is None:
            return []
        left = self._host.close()
        self._host = None
        if self._starts > _RESTARTS:
            self._hopeless = TrialError("crash", f"its ranks died {self._starts} times")
        return left

    def _cell(self, trial: ServingTrial, host: ArmHost) -> Outcome:
        load = self._config.load
        spec = CallSpec(
            model=self._model.name,
            api=load.api.name,
            prompt_tokens=trial.prompt_tokens,
            completion_tokens=trial.completion_tokens,
            vocab_size=self._model.vocab_size,
            temperature=load.temperature,
            ignore_eos=load.ignore_eos,
        )
        requests = requests_of_cell(self._config, trial, spec, not self._calibrated)
        routed, counted = host.router_counts(), host.engine_counts()
        carried = interface_bytes()
        served = host.serve(requests, trial.concurrency)
        self._calibrated = True
        ledger = ledger_of_cell(
            served.record, host.endpoints, (routed, served.router), (counted, served.engines)
        )
        outcome = outcome_of_cell(served.record, trial, ledger)
        outcome.facts |= self._ran
        self._prove(outcome, trial, host, served, carried)
        return outcome

    def _prove(
        self,
        outcome: Outcome,
        trial: ServingTrial,
        host: ArmHost,
        served: Served,
        before: Mapping[str, int],
    ) -> None:
        evidence = []
        for rank, path in enumerate(host.log_paths):
            if path.is_file():
                lines = path.read_text(errors="replace").splitlines()
                evidence += evidence_in_log(rank, lines)
        status, seen = judge(trial.transport.kind, evidence, local_links=trial.layout.tp > 1)
        if trial.gpus == 1:
            status, seen = "not_applicable", ""
        outcome.rows["transport"] = evidence_rows(evidence)
        outcome.facts |= {"transport_status": status, "transport_seen": seen, "shared_gpu": False}

    def _what_ran(self, host: ArmHost) -> dict[str, Any]:
        facts = host.facts()
        machine = local_machine()
        gpu = machine.gpus[0].name if machine.gpus else None
        found = versions() | {"vllm": next(iter(facts.values())).vllm_version}
        found["model"] = self._model.revision
        device = machine.cpu if self._device is DeviceKind.cpu or gpu is None else gpu
        env = {name: fact.environment for name, fact in facts.items()}
        return what_ran(found, {"machines": {machine.hostname: machine.as_dict()}}, env, device)


class AttachedBlock:
    """Cells against a server that is already running."""

    def __init__(self, config: Config, first: ServingTrial) -> None:
        raise NotImplementedError


__all__ = ["AttachedBlock", "EngineBlock", "asdict", "ray"]
