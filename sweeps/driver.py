"""Sends the load of a cell from a client actor, and watches both ends while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from ep_ray.config.schema import ArrivalKind, Config
from ep_ray.watchdog import TrialError, wait_all
from serving.load.actor import LoadClient
from serving.load.arrivals import arrivals_ns, trace_arrivals_ns
from serving.load.records import CellRecord, Request
from serving.load.target import Target
from sweeps.trial import ServingTrial

_POLL_S = 1.0
_WARMUP_IN_FLIGHT = 4  # in an open loop, whose measured requests have no such bound
_CALL_S = 30.0


class Driver:
    """The load client of one arm.

    Args:
        arm: Name of the arm, for the actor's name.
    """

    def __init__(self, arm: str) -> None:
        self._client: Any = LoadClient.options(name=f"client:{arm}", num_cpus=0).remote()
        try:
            wait_all([self._client.ping.remote()], _CALL_S, "start of the load client")
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
            TrialError: The arm or the client died, or the deadline passed.
        """
        deadline_s = config.deadlines.trial_s
        run = self._client.run.remote(
            targets,
            requests,
            trial.concurrency or _WARMUP_IN_FLIGHT,
            config.load.request_timeout_s,
            None,
            arrivals_of(trial, config, requests),
        )
        waited_s = 0.0
        try:
            while not ray.wait([run], timeout=_POLL_S)[0]:
                waited_s += _POLL_S
                check_alive()
                if waited_s > deadline_s:
                    raise TrialError("timeout", f"cell not done within {deadline_s:.0f} s")
        except BaseException:
            self._client.stop.remote()
            raise
        record: CellRecord = wait_all([run], _CALL_S, "the load client")[0]
        return record

    def close(self) -> None:
        """Ends the client and with it every request in flight."""
        ray.kill(self._client)


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
