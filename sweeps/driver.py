"""Sends the load of a cell from client actors, and watches both ends while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ep_ray.config.schema import ArrivalKind, Config
from ep_ray.watchdog import TrialError, wait_all
from serving.load.actor import LoadClient
from serving.load.arrivals import arrivals_ns, trace_arrivals_ns
from serving.load.deal import deal, merge
from serving.load.records import CellRecord, Request
from serving.load.target import Target
from sweeps.trial import ServingTrial

_POLL_S = 1.0
_WARM_POLL_S = 0.02  # several clients, before they begin together
_WARMUP_IN_FLIGHT = 4  # in an open loop, whose measured requests have no such bound
_CALL_S = 30.0
_STOP_S = 5.0
_AHEAD_NS = 250_000_000  # that the clients are told of their common start


class Driver:
    """The load clients of one arm, each in a process of its own.

    Args:
        arm: Name of the arm, for the actors' names.
        clients: Number of them.

    Raises:
        TrialError: A client did not come up, or they are on several hosts, whose clocks differ;
            none is left.
    """

    def __init__(self, arm: str, clients: int = 1) -> None:
        # Their stamps and this process's are of one clock.
        node = ray.get_runtime_context().get_node_id()
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": there}
        names = [f"client:{arm}" + (f":{n}" if n else "") for n in range(clients)]
        actor = cast(Any, LoadClient)
        self._clients = [actor.options(name=name, **options).remote() for name in names]
        try:
            started = [client.ping.remote() for client in self._clients]
            hosts = set(_answers(started))
            if len(hosts) > 1:
                raise TrialError("failed", f"load clients on several hosts: {sorted(hosts)}")
        except BaseException:
            self.close()
            raise

    def send(
        self,
        targets: Sequence[Target],
        requests: Sequence[Request],
        trial: ServingTrial,
        config: Config,
        check_alive: Callable[[], None],
    ) -> CellRecord:
        """Sends one cell's requests and waits, as long as the arm lives.

        Args:
            targets: Servers that take turns.
            requests: All roles.
            trial: The cell.
            config: The experiment.
            check_alive: Raises `TrialError` once a rank or the router is gone.

        Raises:
            TrialError: The arm or a client died, or the deadline passed.
        """
        concurrency = trial.concurrency or _WARMUP_IN_FLIGHT
        arrivals = arrivals_of(trial, config, requests)
        timeout_s = config.load.request_timeout_s
        several = len(self._clients) > 1
        parts = deal(targets, requests, concurrency, len(self._clients), arrivals)
        runs = [
            client.run.remote(
                p.targets, p.requests, p.concurrency, timeout_s, None, p.arrivals_ns, several
            )
            for client, p in zip(self._clients, parts, strict=True)
        ]
        watch = _Watch(runs, config.deadlines.trial_s, check_alive)
        try:
            if several:
                self._begin(watch)
            records = watch.results()
        except BaseException:
            for client in self._clients:
                client.stop.remote()
            ray.wait(runs, num_returns=len(runs), timeout=_STOP_S)
            raise
        return merge(targets, requests, records) if several else records[0]

    def _begin(self, watch: _Watch) -> None:
        """Lets the measured requests of all clients begin at one time, once all are warm."""
        while not all(_answers([client.waits.remote() for client in self._clients])):
            watch.look(_WARM_POLL_S)
        start_ns = time.monotonic_ns() + _AHEAD_NS
        if not all(_answers([client.begin.remote(start_ns) for client in self._clients])):
            raise TrialError(
                "failed",
                f"{len(self._clients)} load clients did not all hear of their common start within "
                f"{_AHEAD_NS / 1e9:g} s: this machine is too busy; lower load.clients",
            )

    def close(self) -> None:
        """Ends the clients and with them every request in flight."""
        for client in self._clients:
            ray.kill(client)


class _Watch:
    """Waits for the clients of a cell as long as the arm lives and time is left.

    Args:
        runs: What each client was asked, as Ray's references.
        deadline_s: Seconds from now.
        check_alive: Raises `TrialError` once the arm is gone.
    """

    def __init__(
        self, runs: Sequence[Any], deadline_s: float, check_alive: Callable[[], None]
    ) -> None:
        self._runs = list(runs)
        self._pending = list(runs)
        self._deadline_s = deadline_s
        self._check_alive = check_alive
        self._begun_s = self._checked_s = time.monotonic()

    def results(self) -> list[CellRecord]:
        """What each client left. Raises `TrialError` at the first that left nothing."""
        while self._pending:
            self.look(_POLL_S)
        return _answers(self._runs)

    def look(self, wait_s: float) -> None:
        """Waits for a client to end, `wait_s` at most.

        Raises:
            TrialError: A client ended without a record, the arm is gone, or the time is over.
        """
        ended, self._pending = ray.wait(self._pending, timeout=wait_s)
        if ended:
            _answers([run if run in ended else None for run in self._runs])
            return
        if time.monotonic() - self._begun_s > self._deadline_s:
            raise TrialError("timeout", f"cell not done within {self._deadline_s:.0f} s")
        if time.monotonic() - self._checked_s > _POLL_S / 2:
            self._check_alive()
            self._checked_s = time.monotonic()


def _answers(refs: Sequence[Any]) -> list[Any]:
    """What each client answers. Raises `TrialError` that names the client that does not."""
    names = ["the load client"]
    if len(refs) > 1:
        names = [f"the load client {n} of {len(refs)}" for n in range(1, len(refs) + 1)]
    pairs = zip(refs, names, strict=True)
    return [wait_all([ref], _CALL_S, name)[0] for ref, name in pairs if ref is not None]


def arrivals_of(
    trial: ServingTrial, config: Config, requests: Sequence[Request] = ()
) -> list[int] | None:
    """When the cell's measured requests are sent; None in a closed loop.

    All arms of a cell and repeat get the same times, for they are compared in pairs. The times of
    a trace come with its requests.
    """
    if trial.rate_per_s is None:
        return None
    if trial.arrival is ArrivalKind.trace:
        at_ms = [request.at_ms for request in requests if request.at_ms is not None]
        return trace_arrivals_ns(at_ms, trial.rate_per_s)
    key = f"{config.seed}/{trial.cell}/r{trial.repeat}"
    load, rate = config.load, trial.rate_per_s
    return arrivals_ns(
        trial.arrival.name, rate, trial.requests, key, load.burstiness, load.ramp_from
    )
