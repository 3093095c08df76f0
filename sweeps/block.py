"""A block of serving cells: one deployment, brought up once, measured cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ep_ray.config.schema import Config
from ep_ray.interrupt import uninterrupted
from ep_ray.transport import judge
from ep_ray.watchdog import TrialError
from serving.load.prompts import build_requests
from sweeps.host import Host
from sweeps.outcome import Outcome, evidence_rows
from sweeps.serving_trial import ledger_of_cell, outcome_of_cell
from sweeps.trial import ServingTrial

_STARTS = 3  # of an arm whose ranks die in the middle of a block


class Block:
    """Cells of one deployment: one arm, or arms that share its engines and take turns.

    The engines stay up for all cells. Engines that do not come up fail the rest of their block at
    once. Where router or client die, they are replaced; engines that die or hang in the middle are
    started again for the next cell, twice at most.

    Args:
        config: The experiment.
        make_host: Makes the arm's host, not yet started.
    """

    def __init__(self, config: Config, make_host: Callable[[], Host]) -> None:
        self._config = config
        self._make_host = make_host
        self._host: Host | None = None
        self._starts = 0
        self._hopeless: TrialError | None = None
        self._calibrated: set[str] = set()
        self._ran: dict[str, Any] = {}

    def run(self, trial: ServingTrial) -> Outcome:
        """Runs one cell.

        Raises:
            TrialError: The arm did not come up, died, or missed a deadline.
        """
        host = self._ready()
        try:
            return self._cell(trial, host)
        except TrialError as error:
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
        requests = build_requests(
            host.call(trial),
            seed=self._config.seed,
            trial_id=trial.trial_id,
            measured=trial.requests,
            warmups=load.warmups,
            # Once per arm: it travels with the arm's first cell.
            calibration=0 if trial.arm in self._calibrated else load.calibration,
        )
        before = host.counts(trial)
        record = host.send(trial, requests)
        self._calibrated.add(trial.arm)
        ledger = ledger_of_cell(record, host.endpoints(), before, host.counts(trial))
        outcome = outcome_of_cell(record, trial, ledger)
        outcome.facts |= self._ran
        outcome.facts["shared_gpu"] = trial.gpus > 1 and self._config.cluster.ranks_per_gpu > 1
        _prove(outcome, trial, host)
        if any(request.state != "complete" for request in record.requests):
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


def _prove(outcome: Outcome, trial: ServingTrial, host: Host) -> None:
    evidence = host.evidence()
    asked = trial.transport.kind
    status, seen = judge(asked, evidence, local_links=trial.layout.tp > 1)
    if trial.gpus <= 1:
        status, seen = "not_applicable", ""
    outcome.rows["transport"] = evidence_rows(evidence)
    outcome.facts |= {"transport_status": status, "transport_seen": seen}
    if status == "contradicted" and outcome.status == "ok":
        outcome.status = "failed"
        outcome.error = f"asked for transport {asked.name}, seen {seen}"
