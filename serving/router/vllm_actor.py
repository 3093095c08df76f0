"""`vllm-router` in a Ray actor, which starts it, watches it and takes it along when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from serving.ports import check_free, router_claims
from serving.router.vllm_router import VllmRouter


@ray.remote(max_restarts=0, max_concurrency=4)
class VllmRouterActor:
    """A `VllmRouter`; methods as there. The process keeps to the cores that the actor keeps to."""

    def __init__(self, program: str, host: str, port: int, log: str) -> None:
        self._claims = router_claims(host, port, {"vllm_router"})
        self._router = VllmRouter(program, host, port, Path(log))

    def start(self, endpoints: Sequence[tuple[str, str]]) -> str:
        """See `VllmRouter.start`. Raises `PortError` for a taken port too."""
        check_free(self._claims)
        return self._router.start(endpoints)

    def exit_code(self) -> int | None:
        """See `VllmRouter.exit_code`."""
        return self._router.exit_code()

    def pid(self) -> int | None:
        """See `VllmRouter.pid`."""
        return self._router.pid()

    def status(self) -> dict[str, Any]:
        """See `VllmRouter.status`."""
        return self._router.status()

    def stop(self) -> list[int]:
        """See `VllmRouter.stop`."""
        return self._router.stop()
