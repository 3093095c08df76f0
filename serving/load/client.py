"""A streaming load client: one thread, one uvloop, raw protocols.

In a closed loop at most `concurrency` requests are in flight and, while requests remain, exactly so
many. In an open loop measured requests are sent when it is their time, whatever is in flight.
Requests are never sent twice. A kept-alive connection that the server closed while idle is
replaced before anything is sent on it; one that breaks after that has failed its request,
even before the first response byte, because the server may have taken the request up and a
second one would make the ledgers disagree.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic_ns

import numpy as np
import uvloop

from serving.load.cancel import Enough
from serving.load.connection import Connection, Exchange, connect, connect_reason
from serving.load.decode import decode
from serving.load.gate import Gate
from serving.load.metrics import cell_record
from serving.load.records import CellRecord, Request, clock_offset_ns
from serving.load.target import Target, request_bytes

HEARTBEAT_NS = 5_000_000
TIMER_NS = 1_000_000
_STOPPED = "stopped by the client"


def run_cell(
    targets: Target | Sequence[Target],
    requests: Sequence[Request],
    concurrency: int,
    request_timeout_s: float,
    *,
    extra_headers: Mapping[str, str] | None = None,
    arrivals_ns: Sequence[int] | None = None,
    stop: threading.Event | None = None,
    gate: Gate | None = None,
) -> CellRecord:
    """Runs one cell: warm-up and calibration requests to completion, then the measured ones.

    Callable from any thread; it owns its event loop.

    Args:
        targets: Where requests go; several take turns, in the order of `requests`.
        requests: What is sent, in this order within the two phases.
        concurrency: Requests in flight.
        request_timeout_s: Deadline of one request, and before that of its connection.
        extra_headers: Further request headers.
        arrivals_ns: Open loop: when each measured request is sent, from the first moment of the
            measured phase on; `concurrency` then bounds the warm-up alone.
        stop: Once set from any thread, requests in flight are aborted and the cell ends.
        gate: Where the measured requests wait until they may begin; None where one client is alone.

    Raises:
        ValueError: There is no target, the concurrency is below 1, request ids repeat, or there
            is not one arrival for each measured request.
    """
    targets = [targets] if isinstance(targets, Target) else list(targets)
    ids = {request.request_id for request in requests}
    if not targets or concurrency < 1 or len(ids) < len(requests):
        raise ValueError(
            f"run_cell: {len(targets)} targets, concurrency {concurrency}, {len(requests)} "
            f"requests with {len(ids)} ids: expected a target, 1 or more, and unique ids"
        )
    measured = sum(request.role == "measured" for request in requests)
    if arrivals_ns is not None and len(arrivals_ns) != measured:
        raise ValueError(f"run_cell: {len(arrivals_ns)} arrivals for {measured} measured requests")
    exchanges = _prepare(targets, requests, extra_headers or {})
    stop = stop or threading.Event()
    loop = _Loop(concurrency, request_timeout_s, stop, arrivals_ns, gate)
    started_cpu_ns = time.thread_time_ns()
    with _no_gc_pauses(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(loop.run(exchanges))
    cpu_ns = time.thread_time_ns() - started_cpu_ns
    return _cell_record(loop, exchanges, cpu_ns)


def _prepare(
    targets: list[Target],
    requests: Sequence[Request],
    extra_headers: Mapping[str, str],
) -> list[Exchange]:
    """Exchanges in the order of sending: what is not measured first."""
    ordered = sorted(requests, key=lambda request: request.role == "measured")
    return [
        Exchange(
            request,
            target,
            request_bytes(target, request, extra_headers),
            None if (tokens := request.cancel_after_tokens) is None else Enough(tokens),
        )
        for request, target in zip(ordered, itertools.cycle(targets), strict=False)
    ]


@contextmanager
def _no_gc_pauses() -> Iterator[None]:
    """Keeps the garbage collector out of a cell; a collection would delay receive stamps."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class _Loop:
    """The loop of one cell and the connections that it keeps."""

    def __init__(
        self,
        concurrency: int,
        timeout_s: float,
        stop: threading.Event,
        arrivals_ns: Sequence[int] | None,
        gate: Gate | None,
    ) -> None:
        self.lags_ns: list[int] = []
        self.replaced = 0
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._stop = stop
        self._arrivals_ns = arrivals_ns
        self._gate = gate
        self._idle: dict[Target, list[Connection]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop
        self._beats: asyncio.TimerHandle

    @property
    def is_open(self) -> bool:
        """Whether requests have times of their own."""
        return self._arrivals_ns is not None

    async def run(self, exchanges: list[Exchange]) -> None:
        self._loop = asyncio.get_running_loop()
        self._beat(monotonic_ns())
        warm, measured = (
            [e for e in exchanges if (e.request.role == "measured") is which]
            for which in (False, True)
        )
        await self._open_connections(warm)
        await self._closed_loop(warm)
        await self._open_connections(measured)
        start_ns = await self._start()
        if self._arrivals_ns is None:
            await self._closed_loop(measured)
        else:
            await self._open_loop(measured, [start_ns + after_ns for after_ns in self._arrivals_ns])
        self._beats.cancel()
        for connection in itertools.chain.from_iterable(self._idle.values()):
            connection.close()

    async def _open_connections(self, phase: list[Exchange]) -> None:
        """Those that the first requests of a phase need."""
        if not self._stop.is_set():
            missing = self._missing(phase[: self._concurrency])
            await self._each([self._open_ahead(target) for target in missing])

    async def _start(self) -> int:
        """When the measured requests begin: now, or when all clients may."""
        if self._gate is None:
            return monotonic_ns()
        self._gate.wait()
        while (start_ns := self._gate.start_ns) is None and not self._stop.is_set():
            await asyncio.sleep(TIMER_NS / 1e9)
        await self._until(start_ns or 0)
        return start_ns or 0

    async def _until(self, due_ns: int) -> None:
        # libuv's timers count whole milliseconds and may be early: the last one is yielded away.
        while (left_ns := due_ns - monotonic_ns()) > 0 and not self._stop.is_set():
            await asyncio.sleep(max(0, left_ns - TIMER_NS) / 1e9)

    async def _closed_loop(self, phase: list[Exchange]) -> None:
        work = iter(phase)  # shared: each slot takes the next exchange
        await self._each([self._slot(work) for _ in phase[: self._concurrency]])

    async def _open_loop(self, phase: list[Exchange], due: list[int]) -> None:
        await self._each([self._send_at(*pair) for pair in zip(due, phase, strict=True)])

    async def _send_at(self, due_ns: int, exchange: Exchange) -> None:
        await self._until(due_ns)
        if not self._stop.is_set():
            await self._attempt(exchange, due_ns)

    def _missing(self, first: list[Exchange]) -> list[Target]:
        """Connections to open so that the first requests of a phase can all start at once."""
        needed = Counter(exchange.target for exchange in first)
        needed.subtract({target: len(idle) for target, idle in self._idle.items()})
        return list(needed.elements())

    async def _each(self, jobs: list[Coroutine[None, None, None]]) -> None:
        """Runs jobs as tasks that the stop event cancels."""
        self._tasks = [asyncio.ensure_future(job) for job in jobs]
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
                raise outcome

    async def _open_ahead(self, target: Target) -> None:
        # A failure is left to the request that needs the connection, whose record names it.
        with suppress(OSError):
            self._give(target, await connect(target, self._timeout_s))

    async def _slot(self, work: Iterator[Exchange]) -> None:
        for exchange in work:
            if self._stop.is_set():
                return
            await self._attempt(exchange, monotonic_ns())

    async def _attempt(self, exchange: Exchange, intended_ns: int) -> None:
        exchange.intended_ns = intended_ns
        try:
            await self._perform(exchange)
        except OSError as error:
            exchange.end(monotonic_ns(), connect_reason(error))

    async def _perform(self, exchange: Exchange) -> None:
        connection: Connection | None = None
        try:
            connection = self._take(exchange.target)
            if connection is None:
                connection = await connect(exchange.target, self._timeout_s)
            await connection.send(exchange, self._timeout_s)
        except asyncio.CancelledError:
            if connection is not None:
                connection.abort(_STOPPED)
            if not exchange.end_ns:
                exchange.end(monotonic_ns(), _STOPPED, aborted=True)
            raise
        self._give(exchange.target, connection)

    def _give(self, target: Target, connection: Connection) -> None:
        if connection.is_open:
            self._idle.setdefault(target, []).append(connection)

    def _take(self, target: Target) -> Connection | None:
        """A connection that may be written to; those that died while idle are dropped."""
        idle = self._idle.get(target, [])
        while idle:
            connection = idle.pop()
            if connection.usable():
                return connection
            connection.close()
            self.replaced += 1
        return None

    def _beat(self, due_ns: int) -> None:
        """Stamps how late the loop is every 5 ms, and looks for the stop event.

        libuv's timers count whole milliseconds, so that one stamp may be off by nearly one.
        """
        now_ns = monotonic_ns()
        self.lags_ns.append(max(0, now_ns - due_ns))
        if self._stop.is_set():
            for task in self._tasks:
                task.cancel()
        self._beats = self._loop.call_later(HEARTBEAT_NS / 1e9, self._beat, now_ns + HEARTBEAT_NS)


def _cell_record(loop: _Loop, exchanges: list[Exchange], cpu_ns: int) -> CellRecord:
    several = len({exchange.target for exchange in exchanges}) > 1
    records = [decode(e, e.target.name if several else None) for e in exchanges if e.intended_ns]
    measured = [r for r in records if r.role == "measured"]
    late_ns = [r.sent_ns - r.intended_ns for r in measured if r.sent_ns is not None]
    lags = [loop.lags_ns, late_ns if loop.is_open else []]
    return cell_record(
        records,
        client_lag_p99_ns=max(int(np.percentile(ns, 99)) if ns else 0 for ns in lags),
        client_cpu_ns=cpu_ns,
        replaced_connections=loop.replaced,
        clock_offset_ns=clock_offset_ns(),
        stopped=any(not e.end_ns or e.reason == _STOPPED for e in exchanges),
    )
