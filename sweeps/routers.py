"""The routers of an arm as the driver of a sweep sees them: each in actors of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ep_ray.config.schema import Config, RouterPolicy
from ep_ray.cores import keep_to, seats
from ep_ray.watchdog import TrialError, wait_all
from serving.ports import listeners, router_claims, wait_free
from serving.router.actor import RouterActor
from serving.router.combined import combine_status, sum_counters
from serving.router.router import Settings
from serving.router.vllm_actor import VllmRouterActor
from serving.router.vllm_router import START_S, find_program, version_of

FOREIGN = RouterPolicy.vllm_router
_CALL_S = 30.0
_DRAIN_S = 1.0


class AnyRouter(Protocol):
    """A router that is up."""

    url: str

    def use(self, policy: RouterPolicy) -> None:
        """Chooses endpoints by this policy from now on."""

    def counters(self) -> Mapping[str, Any] | None:
        """Its running counters; None where it has none of our form."""

    def status(self) -> dict[str, Any]:
        """Its status document."""

    def versions(self) -> dict[str, str]:
        """Versions of what is not ep-ray's own."""

    def check_alive(self) -> None:
        """Raises `TrialError` once it is gone."""

    def close(self) -> None:
        """Ends it, and waits until its ports are free."""


def own_policies(policies: Collection[RouterPolicy]) -> list[RouterPolicy]:
    """Those that ep-ray's own router serves, by name."""
    own = set(policies) - {RouterPolicy.none, FOREIGN}
    return sorted(own, key=lambda policy: policy.name)


def router_cores(policies: Collection[RouterPolicy], processes: int = 1) -> list[int]:
    """Cores that routers keep to; empty where they may run anywhere.

    Routers of two projects are compared on the same cores, one for each of ep-ray's `processes`:
    they take turns, so they share them.
    """
    return seats(processes) if FOREIGN in policies else []


class OwnRouter:
    """ep-ray's router: an actor for each of its processes, all on one port.

    Args:
        config: The experiment.
        name: Of the actor; of several, with `.process0`, ... behind it.
        policies: What is asked of it.
        endpoints: Name and URL of each rank, in rank order.
        parallelism: What its status says of the group.
        cores: From `router_cores`.

    Raises:
        TrialError: It did not come up, or another process listens on its port; nothing of it is
            left.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        policies: Sequence[RouterPolicy],
        endpoints: Sequence[tuple[str, str]],
        parallelism: Mapping[str, object],
        cores: Sequence[int],
    ) -> None:
        asked = config.router
        self._name, self._port = name, asked.port
        self._listens = False
        self._actors: list[Any] = []
        try:
            for process in range(asked.processes):
                settings = _settings(config, policies[0], process)
                own = f"{name}.process{process}" if asked.processes > 1 else name
                self._actors.append(_here(RouterActor, own, own, asked.host, asked.port, settings))
            self.url = self._start()
            given = (endpoints, len(endpoints), parallelism)
            self._ask_all("set_endpoints", "the router's endpoints", *given)
            for actor, core in zip(self._actors, cores, strict=False):
                # after its start, so that its threads are there
                _ask(actor.__ray_call__, "the router's core", keep_to, core)
        except BaseException:
            self.close()
            raise

    def _start(self) -> str:
        """Lets them listen, the first one before the others: see `Settings.process`."""
        first, *others = self._actors
        url: str = _ask(first.start, "start of the router")
        self._listens = True
        for started in [actor.start.remote() for actor in others]:
            wait_all([started], _CALL_S, "start of the router")
        self._check_alone()
        return url

    def _check_alone(self) -> None:
        """Raises `TrialError` where others share the port, for they would take connections."""
        count = len(self._actors)
        if count > 1 and (found := listeners(self._port)) != count:
            raise TrialError(
                "failed",
                f"{found} sockets listen on port {self._port}, which the router's {count} "
                "processes share: another process is on it (`ss -ltnp` names it). End it, or "
                "choose another port with router.port=",
            )

    def _ask_all(self, method: str, what: str, *arguments: object) -> list[Any]:
        """What each process answers, all asked at once."""
        refs = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        names = [f"{what}, process {i}" for i in range(len(refs))] if len(refs) > 1 else [what]
        return [wait_all([r], _CALL_S, n)[0] for r, n in zip(refs, names, strict=True)]

    def use(self, policy: RouterPolicy) -> None:
        """See `AnyRouter`."""
        self._check_alone()  # before every cell
        self._ask_all("use", "the router's policy", policy.name)

    def counters(self) -> Mapping[str, Any] | None:
        """See `AnyRouter`; sums over its processes."""
        return sum_counters(self._ask_all("counters", "the router's counters"))

    def status(self) -> dict[str, Any]:
        """See `AnyRouter`."""
        return combine_status(self._name, self._ask_all("status", "the router's status"))

    def versions(self) -> dict[str, str]:
        """See `AnyRouter`."""
        return {}

    def check_alive(self) -> None:
        """See `AnyRouter`."""
        self.counters()

    def close(self) -> None:
        """See `AnyRouter`."""
        stopping = [actor.stop.remote(_DRAIN_S) for actor in self._actors]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_CALL_S)
        for actor in self._actors:
            ray.kill(actor)
        if self._listens:  # else the port is somebody else's
            wait_free([self._port], _CALL_S)


class VllmRouterHost:
    """`vllm-router` under an actor; it counts nothing that a ledger could trust.

    Args:
        config: The experiment.
        name: Of the actor and of the log.
        endpoints: Name and URL of each rank, in rank order.
        parallelism: What its status says of the group, for it does not know.
        cores: From `router_cores`.
        logs: Folder of its log.

    Raises:
        TrialError: It did not come up; nothing of it is left.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        endpoints: Sequence[tuple[str, str]],
        parallelism: Mapping[str, object],
        cores: Sequence[int],
        logs: Path,
    ) -> None:
        asked = config.router
        self._parallelism = dict(parallelism)
        self._program = find_program(asked.executable)
        claims = router_claims("", asked.port, {FOREIGN.name})
        self._ports = [claim.first for claim in claims]
        log = str(logs.absolute() / f"{name.replace(':', '-')}.log")
        self._actor = _here(VllmRouterActor, name, self._program, asked.host, asked.port, log)
        try:
            if cores:  # before its start: the process inherits them
                _ask(self._actor.__ray_call__, "the cores of vllm-router", keep_to, *cores)
            what = "start of vllm-router"
            self.url: str = _ask(self._actor.start, what, endpoints, deadline_s=START_S + _CALL_S)
        except BaseException:
            self.close()
            raise

    def use(self, policy: RouterPolicy) -> None:
        """It has one policy, round robin."""

    def counters(self) -> Mapping[str, Any] | None:
        """None: what it counts has no roles, and differs with every version.

        Raises:
            TrialError: It is gone.
        """
        self.check_alive()
        return None

    def status(self) -> dict[str, Any]:
        """See `AnyRouter`."""
        document: dict[str, Any] = _ask(self._actor.status, "the status of vllm-router")
        return document | {"parallelism": self._parallelism}

    def versions(self) -> dict[str, str]:
        """See `AnyRouter`."""
        return {"vllm-router": version_of(self._program)}

    def check_alive(self) -> None:
        """See `AnyRouter`."""
        code = _ask(self._actor.exit_code, "vllm-router")
        if code is not None:
            raise TrialError("crash", f"vllm-router ended with exit code {code}")

    def close(self) -> None:
        """See `AnyRouter`."""
        ray.wait([self._actor.stop.remote()], timeout=_CALL_S)
        ray.kill(self._actor)
        wait_free(self._ports, _CALL_S)


def _settings(config: Config, policy: RouterPolicy, process: int) -> Settings:
    asked = config.router
    return Settings(
        policy=policy.name,
        seed=config.seed + process,  # `random` in step would favour ranks in bursts
        connect_timeout_s=asked.connect_timeout_s,
        cooldown_s=asked.cooldown_s,
        processes=asked.processes,
        process=process,
    )


def _here(actor: Any, name: str, *arguments: object) -> Any:
    """An actor on the driver's node, where its ports were seen free."""
    node = ray.get_runtime_context().get_node_id()
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"name": name, "num_cpus": 0, "scheduling_strategy": there}
    return cast(Any, actor).options(**options).remote(*arguments)


def _ask(method: Any, what: str, *arguments: object, deadline_s: float = _CALL_S) -> Any:
    return wait_all([method.remote(*arguments)], deadline_s, what)[0]
