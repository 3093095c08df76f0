"""Holds the measured requests of a client back, so that several clients begin them together."""

from __future__ import annotations

import threading
from time import monotonic_ns


class Gate:
    """Between the warm-up of a client and its measured requests.

    The client's loop asks it; `begin` is called from another thread.
    """

    def __init__(self) -> None:
        self._waiting = threading.Event()
        self._start_ns: int | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the client is warm, its connections are open, and it knows no start yet."""
        return self._waiting.is_set() and self._start_ns is None

    @property
    def start_ns(self) -> int | None:
        """When the measured requests begin, CLOCK_MONOTONIC; None until that is known."""
        return self._start_ns

    def wait(self) -> None:
        """Notes that the client waits from now on."""
        self._waiting.set()

    def begin(self, start_ns: int) -> bool:
        """Opens at a time of CLOCK_MONOTONIC. False if that has passed already."""
        self._start_ns = start_ns
        return monotonic_ns() < start_ns
