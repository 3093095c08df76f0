"""What stands before the ranks of an arm: routers, where there are any, and load clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ep_ray.config.schema import Config, RouterPolicy
from serving.load.records import CellRecord, Request
from serving.load.target import Target
from sweeps.driver import Driver
from sweeps.routers import (
    FOREIGN,
    AnyRouter,
    OwnRouter,
    VllmRouterHost,
    own_policies,
    router_cores,
)
from sweeps.trial import ServingTrial


class Front:
    """Routers and clients in actors of their own; replaced whole when one of them dies.

    Args:
        config: The experiment.
        name: Of the actors; unique, for Ray frees the name of a killed one late.
        policies: What its trials ask of a router; none of them, and there is no router.
        endpoints: Name and URL of each rank, in rank order.
        parallelism: What a router's status says of the group.
        logs: Folder for the logs of routers that are programs.
        direct: Where requests go without a router; by default the ranks, in turn.

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
        logs: Path,
        direct: Sequence[Target] = (),
    ) -> None:
        self._config = config
        api = config.load.api.name
        self._direct = list(direct) or [Target.parse(url, api, rank) for rank, url in endpoints]
        self._routers: dict[RouterPolicy, AnyRouter] = {}
        self._driver: Driver | None = None
        given, cores = (endpoints, parallelism), router_cores(policies, config.router.processes)
        try:
            if own := own_policies(policies):
                router = OwnRouter(config, f"router:{name}", own, *given, cores)
                self._routers |= dict.fromkeys(own, router)
            if FOREIGN in policies:
                actor = f"vllm_router:{name}"
                self._routers[FOREIGN] = VllmRouterHost(config, actor, *given, cores, logs)
            self._driver = Driver(name, config.load.clients)
        except BaseException:
            self.close()
            raise

    def send(
        self, trial: ServingTrial, requests: Sequence[Request], check_alive: Callable[[], None]
    ) -> CellRecord:
        """Sends a cell's load; see `Driver.send`."""
        assert self._driver is not None
        self._use(trial)
        return self._driver.send(self._targets(trial), requests, trial, self._config, check_alive)

    def _use(self, trial: ServingTrial) -> AnyRouter | None:
        """The trial's router, on the trial's policy."""
        router = self._routers.get(trial.router)
        if router is not None:
            router.use(trial.router)
        return router

    def _targets(self, trial: ServingTrial) -> list[Target]:
        """The router, or without one the ranks themselves, which the client takes in turn."""
        router = self._routers.get(trial.router)
        if router is None:
            return self._direct
        return [Target.parse(router.url, self._config.load.api.name)]

    def counters(self, trial: ServingTrial) -> Mapping[str, Any] | None:
        """Running counters of the trial's router; None where nothing is counted."""
        router = self._routers.get(trial.router)
        return None if router is None else router.counters()

    def status(self, trial: ServingTrial) -> dict[str, Any]:
        """The status document of the trial's router; empty for a trial without one."""
        router = self._use(trial)
        return {} if router is None else router.status()

    def versions(self) -> dict[str, str]:
        """Versions of routers that are not ep-ray's own."""
        return {k: v for router in self._routers.values() for k, v in router.versions().items()}

    def check_alive(self) -> None:
        """Raises `TrialError` once a router is gone."""
        for router in set(self._routers.values()):
            router.check_alive()

    def close(self) -> None:
        """Ends routers and client, and waits until the routers' ports are free."""
        if self._driver is not None:
            self._driver.close()
        for router in set(self._routers.values()):
            router.close()
        self._driver, self._routers = None, {}
