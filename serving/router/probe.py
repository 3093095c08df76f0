"""Asks endpoints whether they are healthy, on connections of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from serving.router.framing import FramingError
from serving.router.heads import parse_response


async def probe_all(
    targets: Sequence[tuple[str, str, int]], timeout_s: float
) -> dict[str, str | None]:
    """`GET /health` of each (name, host, port) at once: None, or what is wrong, by name."""
    answers = await asyncio.gather(*(_probe(host, port, timeout_s) for _, host, port in targets))
    return {name: answer for (name, _, _), answer in zip(targets, answers, strict=True)}


async def _probe(host: str, port: int, timeout_s: float) -> str | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(host, port)
    except TimeoutError:
        return f"no answer to GET /health at {host}:{port} within {timeout_s} s"
    except (OSError, EOFError, FramingError, asyncio.LimitOverrunError) as error:
        return f"GET /health at {host}:{port}: {error}"


async def _ask(host: str, port: int) -> str | None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        request = f"GET /health HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n"
        writer.write(request.encode())
        status = parse_response(await reader.readuntil(b"\r\n\r\n")).status
    finally:
        writer.close()
    return None if status == 200 else f"GET /health at {host}:{port}: HTTP {status}"
