"""A block of serving cells: one deployment, brought up once, measured cell by cell."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ep_ray.config.schema import Config, DeviceKind, TransportKind
from ep_ray.interrupt import uninterrupted
from ep_ray.observer import Observer
from ep_ray.proof import counter_evidence, link_evidence
from ep_ray.transport import PEER
from ep_ray.watchdog import TrialError
from serving.load.prompts import build_requests
from serving.load.records import CellRecord
from serving.running import RunningSampler
from sweeps.host import Host
from sweeps.lockstep import lockstep_tables
from sweeps.outcome import Outcome
from sweeps.prove import prove
from sweeps.serving_trial import bad_requests, ledger_of_cell, outcome_of_cell
from sweeps.trial import ServingTrial

_STARTS = 3  # of an arm whose ranks die in the middle of a block


class Block:
    """Cells of one deployment: one arm, or arms that share its engines and take turns.

    The engines stay up for all cells. Engines that do not come up fail the rest of their block at
    once. Where router or client die, they are replaced; engines that die or hang in the middle are
    started again for the next cell, twice at most.

    Args:
        config: The experiment.
        device: `cpu` or `cuda`.
        observer: Watches the machines while a cell runs.
        make_host: Makes the arm's host, not yet started.
    """

    def __init__(
        self,
        config: Config,
        device: DeviceKind,
        observer: Observer,
        make_host: Callable[[], Host],
    ) -> None:
        self._config = config
        self._on_cpu = device is DeviceKind.cpu
        self._observer = observer
        self._make_host = make_host
        self._host: Host | None = None
        self._starts = 0
        self._hopeless: TrialError | None = None
        self._calibrated: set[str] = set()
        self._ran: dict[str, Any] = {}
        self._standing_known = False

    def run(self, trial: ServingTrial) -> Outcome:
        """Runs one cell.

        Raises:
            TrialError: The arm did not come up, died, or missed a deadline.
        """
        host = self._ready()
        try:
            return self._cell(trial, host)
        except TrialError as error:
            error.facts |= self._ran
            if not self._mends(error, host):
                with uninterrupted():
                    left = self._end()
                error.reason += f"\nleft behind: {'; '.join(left)}" if left else ""
            raise
        except BaseException:
            with uninterrupted():
                self._end()
            raise

    def close(self) -> list[str]:
        """Ends the arm. Returns what is left, in words."""
        return self._end()

    def _ready(self) -> Host:
        if self._hopeless is not None:
            raise TrialError(self._hopeless.status, f"the arm is down: {self._hopeless.reason}")
        if self._host is None:
            self._host = self._start()
        return self._host

    def _start(self) -> Host:
        host = self._make_host()
        self._starts += 1
        self._standing_known = False
        try:
            host.start()
            self._ran = host.what_ran()
        except TrialError as error:
            self._hopeless = error
            host.close()
            raise
        except BaseException:
            host.close()
            raise
        return host

    def _end(self) -> list[str]:
        if self._host is None:
            return []
        left = self._host.close()
        self._host = None
        if self._starts >= _STARTS:
            self._hopeless = TrialError("crash", f"it was started {self._starts} times and died")
        return left

    def _cell(self, trial: ServingTrial, host: Host) -> Outcome:
        load = self._config.load
        call = host.call(trial)
        requests = build_requests(
            call,
            seed=self._config.seed,
            trial_id=trial.trial_id,
            measured=trial.requests,
            warmups=load.warmups,
            # Once per arm: it travels with the arm's first cell.
            calibration=0 if trial.arm in self._calibrated else load.calibration,
        )
        standing = [] if self._standing_known else _at("before", host.standing(trial))
        self._standing_known = True
        before = host.counts(trial)
        # Every arm is asked, also one with a single rank: what the asking costs is equal then.
        with self._observer.watch(), RunningSampler(host.rank_urls()) as sampler:
            record = host.send(trial, requests)
        self._calibrated.add(trial.arm)
        ledger = ledger_of_cell(record, host.endpoints(), before, host.counts(trial))
        outcome = outcome_of_cell(record, trial, ledger)
        outcome.rows |= lockstep_tables(sampler.readings, record, host.endpoints())
        outcome.rows["status"] = standing + _at("after", host.standing(trial))
        outcome.facts |= self._ran | {"prompts": call.sent}
        outcome.facts["prompts_digest"] = call.file.digest if call.file else None
        outcome.facts["shared_gpu"] = trial.gpus > 1 and self._config.cluster.ranks_per_gpu > 1
        self._prove(outcome, trial, host, record)
        if bad_requests(record):
            self._examine(outcome, host)
        return outcome

    def _examine(self, outcome: Outcome, host: Host) -> None:
        """Asks an arm that failed requests whether it serves still; ends it if it does not."""
        try:
            host.mend()
        except TrialError as error:
            outcome.status = error.status
            outcome.error = f"{error.reason}\n{outcome.error}"
            with uninterrupted():
                self._end()

    def _mends(self, error: TrialError, host: Host) -> bool:
        """Whether only router or client had died and the arm is whole again."""
        if error.status != "crash":
            return False
        try:
            host.mend()
        except TrialError:
            return False
        return True

    def _prove(self, outcome: Outcome, trial: ServingTrial, host: Host, record: CellRecord) -> None:
        asked = trial.transport.kind
        evidence = host.evidence()
        envs = json.loads(self._ran.get("env_json", "{}"))
        if any(e.transport == PEER for e in evidence):
            linked = self._observer.linked_by_nvlink()
            evidence += link_evidence(evidence, envs.values(), linked)
        # CPU ranks talk over sockets, whatever is asked.
        counted = TransportKind.tcp if self._on_cpu else asked
        expected = host.expert_bytes(record)
        also = "HTTP of this load, Ray, and whatever else the machine runs"
        evidence += counter_evidence(counted, self._observer.grown, expected, also)
        prove(outcome, asked, evidence, crosses=trial.gpus > 1, local_links=trial.layout.tp > 1)


def _at(when: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"when": when, **row} for row in rows]
