"""A sweep: one results folder and one warm Ray session for all points of a command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import Config, DeviceKind
from ep_ray.inventory import Machine, local_machine
from ep_ray.session import Session
from serving.models import MODEL_CACHE
from sweeps.available import Reasons, backend_reasons
from sweeps.feasible import (
    check_feasible,
    ports_of,
    ranks_of,
    resolve_device,
)
from sweeps.folder import writing
from sweeps.isolate import parts
from sweeps.outcome import UNAVAILABLE
from sweeps.plan import plan
from sweeps.print_plan import print_plan
from sweeps.runner import Runner
from sweeps.store import Store
from sweeps.trial import Trial


class Sweep:
    """Plans, runs and records every point of a command line.

    Args:
        points: All points that are known beforehand; each is checked against the hardware
            before anything starts.

    Raises:
        ConfigError: A point cannot run here, or the points do not belong in one sweep.
    """

    def __init__(self, points: Sequence[Config]) -> None:
        first = points[0]
        for point in points:
            _refuse_mixed(first, point)
        self._plan_only = first.plan_only
        self._session = Session(first.cluster, ranks=1)
        self._machines = self._look_around(first)
        points = [part for point in points for part in self._parts(point)]
        plans = [self._plan(point) for point in points]
        self._store: Store | None = None
        self._finished = self._plan_only
        if self._plan_only:
            return
        for point, trials in zip(points, plans, strict=True):
            device = resolve_device(point, self._machines)
            reasons = self._reasons(point, trials, device)
            check_feasible(point, trials, device, self._machines, reasons)
        self._session.ranks = max((ranks_of(t) for trials in plans for t in trials), default=1)
        self._store = self._open_store(first, plans)

    def _look_around(self, config: Config) -> list[Machine]:
        """This machine, or every node of an attached cluster; joining one starts nothing."""
        if config.cluster.address is None or config.plan_only:
            return [local_machine()]
        self._session.start()
        return [node.machine for node in self._session.nodes]

    def _reasons(self, config: Config, trials: Sequence[Trial], device: DeviceKind) -> Reasons:
        elsewhere = self._session.nodes if config.cluster.address else ()
        return backend_reasons(trials, device, elsewhere)

    def _parts(self, config: Config) -> list[Config]:
        return parts(config, resolve_device(config, self._machines), MODEL_CACHE)

    def _plan(self, config: Config) -> list[Trial]:
        return plan(config, resolve_device(config, self._machines))

    def _open_store(self, first: Config, plans: Sequence[list[Trial]]) -> Store:
        planned = {trial.trial_id for trials in plans for trial in trials}
        if first.resume is None:
            store = Store.create(Path(first.results), first.name)
            store.add_plan(first.name, sorted(planned))
            return store
        store = Store.open(Path(first.resume))
        known = store.plan_ids()
        if known and not planned & known:
            store.close()
            raise ConfigError(
                f"resume={first.resume}: none of its {len(known)} trials is in this experiment; "
                "give the same experiment and overrides as then"
            )
        return store

    def run(self, config: Config) -> None:
        """Runs what is missing of one point. Failed trials become rows, not exceptions."""
        for part in self._parts(config):
            self._run(part)

    def _run(self, config: Config) -> None:
        trials = self._plan(config)
        device = resolve_device(config, self._machines)
        if self._store is None:
            print_plan(config, trials, device)
            return
        self._store.add_plan(config.name, [trial.trial_id for trial in trials])
        todo = [trial for trial in trials if not self._store.is_done(trial.trial_id)]
        if not todo:
            return
        self._session.start()
        self._session.check_ports(ports_of(config, trials))
        self._announce(config, len(todo), len(trials))
        # Without skipping, none of them would have been let in.
        skip = config.against.skip_unavailable
        reasons = self._reasons(config, todo, device) if skip else {}
        with Runner(config, device, self._store, len(todo), reasons) as runner:
            for _, block in groupby(todo, key=lambda trial: trial.block):
                runner.run_block(list(block))

    def _announce(self, config: Config, todo: int, total: int) -> None:
        assert self._store is not None
        skipped = f" ({total - todo} already done)" if todo < total else ""
        print(f"ep-ray: {config.name}: {todo} trials{skipped}; results in {self._store.folder}")
        if self._session.dashboard_url:
            print(f"ep-ray: Ray dashboard at {self._session.dashboard_url}")
        sys.stdout.flush()

    def finish(self) -> bool:
        """Writes the tables, prints the report, and says whether every trial is ok."""
        if self._store is None:
            return True
        self._store.finalise()
        statuses = self._store.statuses()
        if statuses:
            _print_report(self._store.folder)
        self._finished = True
        bad = sum(status not in ("ok", UNAVAILABLE) for status in statuses.values())
        missing = len(self._store.plan_ids() - set(statuses))
        if bad or missing:
            _advise(f"{bad} trials failed, {missing} did not run", self._store.folder)
        return not bad and not missing

    def close(self) -> None:
        """Leaves the results folder and Ray; says how to go on if the sweep was cut short."""
        try:
            if self._store is not None:
                self._store.close()
        finally:
            self._session.close()
        if self._store is not None and not self._finished:
            ended, planned = len(self._store.statuses()), len(self._store.plan_ids())
            _advise(f"cut short: {ended} of {planned} trials ended", self._store.folder)


def _refuse_mixed(first: Config, other: Config) -> None:
    for key in ("cluster", "results", "resume", "plan_only"):
        if getattr(first, key) != getattr(other, key):
            raise ConfigError(
                f"`{key}` cannot differ within one sweep, which has one Ray session and one "
                "results folder; run one command for each"
            )


def _print_report(folder: Path) -> None:
    from sweeps.render_markdown import markdown
    from sweeps.render_text import print_report
    from sweeps.report import footer, of_results

    report = of_results(folder)
    print_report(report.title, report.brief, sys.stdout)
    target = folder / "report.md"
    with writing(folder):
        target.write_text(markdown(report.title, report.full), encoding="utf-8")
    print(footer(folder, target))


def _advise(what: str, folder: Path) -> None:
    print(
        f"\nep-ray: {what}; again with the same command and resume={folder}\n"
        f"        what there is: python -m ep_ray.report {folder}",
        file=sys.stderr,
    )
