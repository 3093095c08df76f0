"""A real HTTP server on loopback that misbehaves on command, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

DEADLINE_S = 20.0
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
)


def event(content: Any) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def token(text: str = "x", *, so_far: int | None = None, finish: str | None = None) -> bytes:
    usage = None if so_far is None else {"prompt_tokens": 7, "completion_tokens": so_far}
    return event({"choices": [{"text": text, "finish_reason": finish}], "usage": usage})


def tokens(count: int) -> list[bytes]:
    last = count - 1
    return [token(so_far=i + 1, finish="length" if i == last else None) for i in range(count)]


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def chunked(*payloads: bytes) -> bytes:
    return b"".join(chunk(payload) for payload in payloads) + b"0\r\n\r\n"


@dataclass
class Call:
    """One request as the server saw it."""

    headers: dict[str, str]
    body: dict[str, Any]
    connection: int
    client_left: threading.Event = field(default_factory=threading.Event)

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]


# Writes what it likes, and may return the bytes that end the response.
Behave = Callable[
    ["FakeServer", Call, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes | None]
]


class FakeServer:
    """Answers every request by `behave`; keeps connections alive unless `behave` closes them."""

    def __init__(self, behave: Behave, tls: ssl.SSLContext | None = None) -> None:
        self.calls: list[Call] = []
        self.connections = 0
        self.in_flight = 0
        self.in_flight_max = 0
        self.answered = 0
        self.hung_up = threading.Event()  # a test's behave sets it after closing a connection
        self._behave, self._tls = behave, tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._wait(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"{'https://localhost' if self._tls else 'http://127.0.0.1'}:{self.port}"

    def close(self) -> None:
        self._wait(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def _wait(self, job: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(DEADLINE_S)

    async def _shut_down(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = self.connections
        try:
            while not writer.is_closing():
                call = await _read_call(reader, connection)
                self.calls.append(call)
                self.in_flight += 1
                self.in_flight_max = max(self.in_flight_max, self.in_flight)
                try:
                    rest = await self._behave(self, call, reader, writer)
                finally:
                    self.in_flight -= 1  # before the client can know that it has ended
                    self.answered += 1
                if rest:
                    writer.write(rest)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def _read_call(reader: asyncio.StreamReader, connection: int) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = json.loads(await reader.readexactly(int(headers["content-length"])))
    return Call(headers, body, connection)


def reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection with a TCP reset."""
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


@pytest.fixture
def fake_server() -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def start(behave: Behave, tls: ssl.SSLContext | None = None) -> FakeServer:
        servers.append(FakeServer(behave, tls))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
