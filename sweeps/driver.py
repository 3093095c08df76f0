"""Sends the load of a cell from a client actor, and watches both ends while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from ep_ray.watchdog import TrialError, wait_all
from serving.load.actor import LoadClient
from serving.load.records import CellRecord, Request
from serving.load.target import Target

_POLL_S = 1.0
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
        concurrency: int,
        request_timeout_s: float,
        deadline_s: float,
        check_alive: Callable[[], None],
    ) -> CellRecord:
        """Sends one cell's requests and waits, as long as the arm lives.

        Args:
            targets: Servers that take turns.
            requests: All roles.
            concurrency: Requests in flight.
            request_timeout_s: Deadline of one request.
            deadline_s: Deadline of the cell.
            check_alive: Raises `TrialError` once a rank or the router is gone.

        Raises:
            TrialError: The arm or the client died, or the deadline passed.
        """
        run = self._client.run.remote(targets, requests, concurrency, request_timeout_s)
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
