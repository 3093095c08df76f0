"""The load client as a Ray actor, so that it runs on a node of its own choosing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence

import ray

from serving.load.client import run_cell
from serving.load.gate import Gate
from serving.load.records import CellRecord, Request
from serving.load.target import Target

# One thread for the cell, and room for the other calls while it runs.
_THREADS = 4


class LoadClientActor:
    """Runs cells, one at a time, and can be stopped from outside while it does."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._stop: threading.Event | None = None
        self._gate: Gate | None = None

    def ping(self) -> str:
        """Name of the node that sends the load."""
        return socket.gethostname()

    def run(
        self,
        targets: Sequence[Target],
        requests: Sequence[Request],
        concurrency: int,
        request_timeout_s: float,
        extra_headers: Mapping[str, str] | None = None,
        arrivals_ns: Sequence[int] | None = None,
        together: bool = False,
    ) -> CellRecord:
        """Runs one cell; see `run_cell`. With `together`, measured requests wait for `begin`.

        Raises:
            RuntimeError: A cell is running already.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this load client is running a cell: wait for it, or stop it")
        stop = self._stop = threading.Event()
        gate = self._gate = Gate() if together else None
        try:
            return run_cell(
                targets,
                requests,
                concurrency,
                request_timeout_s,
                extra_headers=extra_headers,
                arrivals_ns=arrivals_ns,
                stop=stop,
                gate=gate,
            )
        finally:
            self._stop = self._gate = None
            self._busy.release()

    def waits(self) -> bool:
        """Whether a cell has warmed up, and its measured requests wait for `begin`."""
        gate = self._gate
        return gate is not None and gate.is_waiting

    def begin(self, start_ns: int) -> bool:
        """Sends the measured requests from this CLOCK_MONOTONIC time of the client's host on.

        False if the time has passed, or nothing waits for it.
        """
        gate = self._gate
        return gate is not None and gate.begin(start_ns)

    def stop(self) -> bool:
        """Ends the running cell, whose `run` then returns what there is. False if none runs."""
        stop = self._stop
        if stop is None:
            return False
        stop.set()
        return True


LoadClient = ray.remote(max_concurrency=_THREADS)(LoadClientActor)
