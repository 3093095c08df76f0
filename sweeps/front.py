"""What stands before the ranks of an arm: the router, where there is one, and the load client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import ray

from ep_ray.config.schema import Config, RouterPolicy
from ep_ray.watchdog import wait_all
from serving.load.records import CellRecord, Request
from serving.load.target import Target
from serving.ports import wait_free
from serving.router.actor import RouterActor
from serving.router.router import Settings
from sweeps.driver import Driver
from sweeps.trial import ServingTrial

_CALL_S = 30.0
_DRAIN_S = 1.0


class Front:
    """Router and client in actors of their own; replaced whole when one of them dies.

    Args:
        config: The experiment.
        name: Of the actors; unique, for Ray frees the name of a killed one late.
        policies: What its trials ask of a router; none of them, and there is no router.
        endpoints: Name and URL of each rank, in rank order.
        parallelism: What the router's status says of the group.

    Raises:
        TrialError: Router or client did not come up; nothing of them is left.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        policies: Collection[RouterPolicy],
        endpoints: Sequence[tuple[str, str]],
        parallelism: Mapping[str, object],
    ) -> None:
        self._config = config
        self._endpoints = list(endpoints)
        self._router: Any = None
        self._driver: Driver | None = None
        self._url = ""
        try:
            if policies:
                self._start_router(f"router:{name}", policies, parallelism)
            self._driver = Driver(name)
        except BaseException:
            self.close()
            raise

    def _start_router(
        self, name: str, policies: Collection[RouterPolicy], parallelism: Mapping[str, object]
    ) -> None:
        asked = self._config.router
        settings = Settings(
            min(policy.name for policy in policies),  # each cell says which it uses
            self._config.seed,
            asked.connect_timeout_s,
            asked.cooldown_s,
        )
        self._router = (
            cast(Any, RouterActor)
            .options(name=name, num_cpus=0)
            .remote(name, asked.host, asked.port, settings)
        )
        self._url = self._ask(self._router.start, "start of the router")
        given = (self._endpoints, len(self._endpoints), parallelism)
        self._ask(self._router.set_endpoints, "the router's endpoints", *given)

    def _ask(self, method: Any, what: str, *arguments: object) -> Any:
        return wait_all([method.remote(*arguments)], _CALL_S, what)[0]

    def send(
        self, trial: ServingTrial, requests: Sequence[Request], check_alive: Callable[[], None]
    ) -> CellRecord:
        """Sends a cell's load; see `Driver.send`."""
        assert self._driver is not None
        self._use(trial)
        return self._driver.send(self._targets(trial), requests, trial, self._config, check_alive)

    def _use(self, trial: ServingTrial) -> None:
        if trial.router is not RouterPolicy.none:
            self._ask(self._router.use, "the router's policy", trial.router.name)

    def _targets(self, trial: ServingTrial) -> list[Target]:
        """The router, or without one the ranks themselves, which the client takes in turn."""
        api = self._config.load.api.name
        if trial.router is RouterPolicy.none:
            return [Target.parse(url, api, name) for name, url in self._endpoints]
        return [Target.parse(self._url, api)]

    def counters(self) -> Mapping[str, Any] | None:
        """The router's running counters; None without a router."""
        if self._router is None:
            return None
        found: Mapping[str, Any] = self._ask(self._router.counters, "the router's counters")
        return found

    def status(self, trial: ServingTrial) -> dict[str, Any]:
        """The status document of the trial's router; empty for a trial without one."""
        if trial.router is RouterPolicy.none:
            return {}
        self._use(trial)
        document: dict[str, Any] = self._ask(self._router.status, "the router's status")
        return document

    def close(self) -> None:
        """Ends router and client, and waits until the router's port is free."""
        if self._driver is not None:
            self._driver.close()
        if self._router is not None:
            ray.wait([self._router.stop.remote(_DRAIN_S)], timeout=_CALL_S)
            ray.kill(self._router)
            wait_free([self._config.router.port], _CALL_S)
        self._driver = self._router = None
