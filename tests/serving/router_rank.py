"""A small API server on a real socket whose every answer a test scripts, and raw clients."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 20.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}"


class Rank:
    """Answers each request by `answer(rank, connection, request)`; a thread per connection.

    `serve(connection)` replaces the reading of requests too.
    """

    def __init__(
        self,
        answer: Callable[[Rank, socket.socket, bytes], None] | None = None,
        serve: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self._serve = serve or self._serve_requests
        self.answer = answer or (lambda rank, connection, request: connection.sendall(OK))
        self.requests: list[bytes] = []
        self.connections: list[socket.socket] = []
        self.go_on = threading.Event()  # for tests: lets a waiting answer proceed
        self.reached = threading.Event()  # for tests: an answer got to its waiting point
        self.left = threading.Event()  # the router closed a connection
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(DEADLINE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve_requests(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while request := read_request(connection):
                self.requests.append(request)
                self.answer(self, connection, request)
        self.left.set()
        connection.close()

    def wait_left(self, connection: socket.socket) -> None:
        """Returns when the router has closed this connection."""
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
        self.left.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def read_request(connection: socket.socket) -> bytes:
    """One request with a content length, or none; empty at the end of the stream."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(1)
        if not more:
            return b""
        data += more
    length = 0
    for line in data.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    while length and len(data) < data.index(b"\r\n\r\n") + 4 + length:
        data += connection.recv(65536)
    return data


def connect(url: str) -> socket.socket:
    """A raw connection to the router with a deadline."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def ask(url: str, method: str = "POST", path: str = "/v1/completions", **headers: str) -> Any:
    """One request on a new connection: (status, headers, body)."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, b"{}" if method == "POST" else None, names)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def read_until(connection: socket.socket, ending: bytes) -> bytes:
    """Reads until the bytes end so."""
    data = b""
    while not data.endswith(ending):
        more = connection.recv(65536)
        assert more, f"the connection ended behind {data!r}"
        data += more
    return data


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for something that another thread does."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.005)
