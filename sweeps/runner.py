"""Runs blocks of trials and records each at once, failed ones included."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

from ep_ray.config.schema import ArmKind, Config, DeviceKind, RouterPolicy
from ep_ray.interrupt import uninterrupted
from ep_ray.observer import Observer
from ep_ray.telemetry import tags
from ep_ray.watchdog import TrialError
from serving.models import MODEL_CACHE, resolve
from sweeps.a2a_host import A2aHost
from sweeps.arm_host import ArmHost
from sweeps.attached_host import AttachedHost
from sweeps.available import Reasons
from sweeps.block import Block
from sweeps.host import Host
from sweeps.null_host import NullHost
from sweeps.outcome import UNAVAILABLE, Outcome, released_rows, trial_row
from sweeps.progress import Progress
from sweeps.store import Store
from sweeps.trial import A2aTrial, ServingTrial, Trial


class Runner:
    """Runs the trials of one experiment; a context manager that leaves nothing behind.

    Args:
        config: The experiment.
        device: `cpu` or `cuda`.
        store: Where trials are recorded.
        total: Trials to run.
        backends: Why backends cannot run, by arm; their trials are recorded and skipped.
    """

    def __init__(
        self,
        config: Config,
        device: DeviceKind,
        store: Store,
        total: int,
        backends: Reasons,
    ) -> None:
        self._config = config
        self._backends = backends
        self._device = device
        self._store = store
        self._progress = Progress(config.name, total)
        self._observer = Observer()

    def __enter__(self) -> Runner:
        self._observer.start()  # beside the ranks, which take longer
        return self

    def __exit__(self, *_: object) -> None:
        self._observer.close()
        self._progress.close()

    def run_block(self, trials: Sequence[Trial]) -> None:
        """Runs trials that share actors or engines, in order."""
        host = self._host(trials)
        try:
            for trial in trials:
                self._progress.begin(trial.trial_id)
                self._record(trial, host)
        finally:
            with uninterrupted():
                left = host.close()
                if isinstance(trials[0], ServingTrial):
                    self._note_released(trials, left)
            if left:
                print(f"ep-ray: left behind: {'; '.join(left)}", file=sys.stderr)

    def _note_released(self, trials: Sequence[Trial], left: Sequence[str]) -> None:
        """What the machines hold once an arm has gone, under the last of its trials that ended."""
        statuses = self._store.statuses()
        ended = [trial for trial in trials if trial.trial_id in statuses]
        if ended:
            rows = released_rows(self._observer.held(), "; ".join(left))
            self._store.add(ended[-1].trial_id, {"released": rows})

    def _host(self, trials: Sequence[Trial]) -> Any:
        first = trials[0]
        if isinstance(first, A2aTrial):
            most = max(t.ep for t in trials if isinstance(t, A2aTrial))
            label = self._store.sweep_id
            return A2aHost(self._config, self._device, most, label, self._observer)
        assert isinstance(first, ServingTrial)
        routers = {t.router for t in trials if isinstance(t, ServingTrial)}
        make_host = partial(self._serving_host, first, routers)
        return Block(self._config, self._device, self._observer, make_host)

    def _serving_host(self, first: ServingTrial, routers: set[RouterPolicy]) -> Host:
        if first.layout.kind is ArmKind.null_engine:
            return NullHost(self._config, first, routers, self._store.folder)
        if first.layout.kind is ArmKind.attached:
            return AttachedHost(self._config, first, routers, self._store.folder)
        model = resolve(self._config.model, MODEL_CACHE)
        return ArmHost(self._config, first, routers, model, self._device, self._store.folder)

    def _record(self, trial: Trial, host: Any) -> None:
        started_ns = time.time_ns()
        outcome: Outcome
        try:
            if isinstance(trial, A2aTrial) and (reasons := self._backends.get(trial.arm)):
                outcome = Outcome(status=UNAVAILABLE, error="\n".join(reasons))
            else:
                outcome = host.run(trial)
        except TrialError as error:
            outcome = Outcome(status=error.status, error=error.reason, facts=dict(error.facts))
        except Exception:  # a fault of ours; the other trials may still tell something
            outcome = Outcome(status="failed", error=traceback.format_exc())
        readings = self._observer.take()
        outcome.rows["telemetry"] = [vars(reading) for reading in readings]
        outcome.facts["tags"] = "; ".join(tags(readings)) or None
        self._store.append(trial_row(trial, self._config.name, outcome, started_ns), outcome.rows)
        self._progress.end(outcome.status, trial.arm, outcome.headline)
