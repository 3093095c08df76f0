"""Ctrl-C and SIGTERM: one KeyboardInterrupt, but never inside a teardown.

An interrupt that lands in the middle of ending ranks or engines would leave some behind, and
people press Ctrl-C twice. So a teardown runs under `uninterrupted`: signals wait until it is
over. Every teardown has deadlines of its own, so the wait is bounded; and a driver that is
killed instead takes everything with it too, for Ray's processes end with their driver.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_depth = 0
_waiting = False


def install() -> None:
    """Makes both signals raise KeyboardInterrupt; to be called in the main thread.

    `ray.init` replaces the handler of SIGTERM; `Session` puts it back.
    """
    for signum in _SIGNALS:
        signal.signal(signum, _interrupt)


def ignore() -> None:
    """Ignores both signals from now on: everything has ended, and the process is leaving."""
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _waiting
    if not _depth:
        raise KeyboardInterrupt
    if not _waiting:
        # Not `print`: a handler may run in the middle of one.
        os.write(2, b"ep-ray: interrupted; ending what runs, please wait\n")
    _waiting = True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Lets signals wait until the block is over; they then raise KeyboardInterrupt. Nests."""
    global _depth, _waiting
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _waiting and not _depth:
            _waiting = False
            raise KeyboardInterrupt
