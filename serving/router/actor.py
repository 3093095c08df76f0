"""The router as a Ray actor. Requests reach it by HTTP; only its owner uses Ray calls."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util import metrics

from serving.router.router import Router, Settings

_PUBLISH_EVERY_S = 1.0


@ray.remote(max_restarts=0, max_concurrency=4)
class RouterActor:
    """A `Router` in a process of its own; methods as there.

    It is not restarted: a router that came back would have lost its counters. Calls run
    concurrently, so that status and counters answer while `stop` drains.
    """

    def __init__(
        self, name: str, host: str = "127.0.0.1", port: int = 0, settings: Settings | None = None
    ) -> None:
        self._router = Router(name, host, port, settings or Settings())
        self._publisher = _Publisher(self._router)

    def start(self) -> str:
        """Listens; returns the router's URL. Raises `RouterError` when the port is taken."""
        url = self._router.start()
        self._publisher.start()
        gc.freeze()  # what is loaded now stays: no full collection walks it during a cell
        return url

    def set_endpoints(
        self,
        endpoints: Sequence[tuple[str, str]],
        desired: int | None = None,
        parallelism: Mapping[str, object] | None = None,
    ) -> None:
        """See `Router.set_endpoints`."""
        self._router.set_endpoints(endpoints, desired, parallelism)

    def use(self, policy: str) -> None:
        """See `Router.use`."""
        self._router.use(policy)

    def counters(self) -> dict[str, dict[str, dict[str, int]]]:
        """See `Router.counters`."""
        return self._router.counters()

    def status(self) -> dict[str, Any]:
        """See `Router.status`."""
        return self._router.status()

    def probe(self, timeout_s: float = 5.0) -> dict[str, str | None]:
        """See `Router.probe`."""
        return self._router.probe(timeout_s)

    def stop(self, drain_s: float = 0.0) -> int:
        """See `Router.stop`."""
        self._publisher.stop()
        return self._router.stop(drain_s)


class _Publisher:
    """Publishes counters as Ray metrics once a second, so that requests never pay for it."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._published: dict[tuple[str, str], int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="router:metrics", daemon=True)
        tags = ("router", "endpoint")
        self._in_flight = metrics.Gauge(
            "ep_ray_router_in_flight", "Requests on their way", tag_keys=tags
        )
        self._forwarded = metrics.Counter(
            "ep_ray_router_forwarded", "Requests forwarded", tag_keys=(*tags, "role")
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread before the router stops; it publishes no more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopped.wait(_PUBLISH_EVERY_S):
            self._publish(self._router.status())

    def _publish(self, status: Mapping[str, Any]) -> None:
        for endpoint in status["endpoints"]:
            name = endpoint["name"]
            tags = {"router": self._router.name, "endpoint": name}
            self._in_flight.set(endpoint["in_flight"], tags)
            for role, tally in endpoint["counters"].items():
                rise = tally["forwarded"] - self._published.get((name, role), 0)
                if rise:
                    self._forwarded.inc(rise, {**tags, "role": role})
                    self._published[name, role] = tally["forwarded"]
