"""The load client as a Ray actor, so that it runs on a node of its own choosing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence

import ray

from serving.load.client import run_cell
from serving.load.records import CellRecord, Request
from serving.load.target import Target

# One thread for the cell, and room for `ping` and `stop` while it runs.
_THREADS = 4


class LoadClientActor:
    """Runs cells, one at a time, and can be stopped from outside while it does."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._stop: threading.Event | None = None

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
    ) -> CellRecord:
        """Runs one cell; see `run_cell`.

        Raises:
            RuntimeError: A cell is running already.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this load client is running a cell: wait for it, or stop it")
        stop = self._stop = threading.Event()
        try:
            return run_cell(
                targets,
                requests,
                concurrency,
                request_timeout_s,
                extra_headers=extra_headers,
                arrivals_ns=arrivals_ns,
                stop=stop,
            )
        finally:
            self._stop = None
            self._busy.release()

    def stop(self) -> bool:
        """Ends the running cell, whose `run` then returns what there is. False if none runs."""
        stop = self._stop
        if stop is None:
            return False
        stop.set()
        return True


LoadClient = ray.remote(max_concurrency=_THREADS)(LoadClientActor)
