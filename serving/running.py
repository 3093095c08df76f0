"""Requests that each rank runs and holds back while a cell runs, read from the ranks' own gauges.

Ranks that share an expert collective step together, so that what one of them lacks the others
wait for: counts at the end of a cell cannot show it.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic_ns
from types import TracebackType
from urllib.parse import urlsplit

from serving.engine_http import RUNNING, WAITING, parse_running
from serving.load.http1 import ResponseParser

INTERVAL_S = 0.25
"""Between readings: some in every second, for batches change with each request that ends. Each one
takes a moment of the loop on which the rank's server streams its tokens, so no more than that."""

_END_S = 1.0
_READ = 1 << 16
# vLLM writes out the named metrics only, which is much less work than all of them.
_ONLY = f"?name%5B%5D={RUNNING}&name%5B%5D={WAITING}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one engine said of its batch.

    Attributes:
        endpoint: The rank's name.
        engine: vLLM's index of the engine, as several may stand behind one endpoint; None where
            the server does not say it.
        monotonic_ns: When all ranks were asked, CLOCK_MONOTONIC of this host: equal in all their
            answers.
        running: Requests in its batch, as of its last step.
        waiting: Requests in its queue.
    """

    endpoint: str
    engine: int | None
    monotonic_ns: int
    running: int
    waiting: int


class RunningSampler:
    """Asks all ranks at once every `INTERVAL_S`, from a thread of its own, within a `with` block.

    A rank that does not answer before the next time leaves a gap; nothing here fails a cell or
    holds it up. At the end of the block what is still asked is dropped.

    Args:
        ranks: Name and base URL of each rank.

    Attributes:
        readings: What was answered, in the order of asking.
    """

    def __init__(self, ranks: Sequence[tuple[str, str]]) -> None:
        self.readings: list[Reading] = []
        self._ranks = [_Rank(name, url) for name, url in ranks]
        self._thread = threading.Thread(target=self._run, name="running requests", daemon=True)
        self._begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None

    def __enter__(self) -> RunningSampler:
        if self._ranks:
            self._thread.start()
            self._begun.wait(_END_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loop is not None and self._watching is not None:
            with suppress(RuntimeError):  # its loop has ended by itself
                self._loop.call_soon_threadsafe(self._watching.cancel)
            # The look-up of a host's name is all that cannot be cancelled.
            self._thread.join(_END_S)

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._watch())
        self._begun.set()
        await self._watching

    async def _watch(self) -> None:
        while True:
            asked_ns = monotonic_ns()
            await asyncio.gather(*(self._ask(rank, asked_ns) for rank in self._ranks))
            await asyncio.sleep(INTERVAL_S - (monotonic_ns() - asked_ns) / 1e9)

    async def _ask(self, rank: _Rank, asked_ns: int) -> None:
        for engine, (running, waiting) in (await rank.gauges()).items():
            self.readings.append(Reading(rank.name, engine, asked_ns, running, waiting))


class _Rank:
    """One server's `/metrics`."""

    def __init__(self, name: str, url: str) -> None:
        split = urlsplit(url)
        tls = split.scheme == "https"
        self.name = name
        self._host, self._port = split.hostname or "", split.port or (443 if tls else 80)
        self._tls = ssl.create_default_context() if tls else None
        self._authority = split.netloc.rpartition("@")[2]
        self._path = f"{split.path.rstrip('/')}/metrics"
        self._query = _ONLY

    async def gauges(self) -> dict[int | None, tuple[int, int]]:
        """(running, waiting) by engine; nothing where no answer came in time."""
        try:
            async with asyncio.timeout(INTERVAL_S):
                found = parse_running(await self._get())
        except (OSError, EOFError, ValueError):
            return {}
        if not found:
            # Some servers cannot give a part of their metrics, as several processes together.
            self._query = ""
        return found

    async def _get(self) -> str:
        """The metrics, or nothing where the server has none there.

        Raises:
            OSError, EOFError, ValueError: It gave no answer, or one that is not HTTP.
        """
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            writer.write(
                f"GET {self._path}{self._query} HTTP/1.1\r\nhost: {self._authority}\r\n"
                "accept-encoding: identity\r\nconnection: close\r\n\r\n".encode()
            )
            parser, ended = ResponseParser(), False
            while not ended:
                data = await reader.read(_READ)
                ended = parser.feed(data) if data else parser.feed_eof()
                if not data and not ended:
                    raise EOFError(f"{self._authority}: the answer broke off")
        finally:
            writer.close()
        return b"".join(parser.body).decode() if parser.status == 200 else ""
