"""An OpenAI-compatible server without a model, which knows when it really sent.

One thread on one epoll loop. Within the last millisecond before a send it spins, because the
timers of epoll count whole milliseconds, so that it wants a core of its own.
"""

from __future__ import annotations

import heapq
import json
import select
import socket
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from time import monotonic_ns
from types import FrameType

from serving.null_events import Asked, plain, sends, whole

_SPIN_NS = 1_000_000
_IDLE_S = 0.2
_READ = 1 << 18
_WRITES = 16  # of one stream without delay, before another has its turn
_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast streams go.

    Attributes:
        ttft_ns: From the last byte of a request to the first token.
        itl_ns: From one write to the next; 0 writes as fast as the socket takes it.
        tokens_per_send: Tokens in one write.
    """

    ttft_ns: int = 0
    itl_ns: int = 0
    tokens_per_send: int = 1


AS_A_MODEL = Pace(ttft_ns=50_000_000, itl_ns=10_000_000)
"""About what a served model does, so that client and router have the work that they would have."""


@dataclass(slots=True)
class Sent:
    """A finished stream; CLOCK_MONOTONIC nanoseconds.

    Attributes:
        request_id: The header `x-request-id`.
        received_ns: When its request was complete here.
        first_ns: Just before its first write.
        last_ns: Just before its last write.
        tokens: Of its completion.
    """

    request_id: str
    received_ns: int
    first_ns: int
    last_ns: int
    tokens: int


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)
    received_ns: int = 0  # when its last bytes were read
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    parts: deque[bytes] = field(default_factory=deque)
    sent: Sent | None = None  # of the request in progress
    is_open: bool = True


class NullEngine:
    """The server; `serve` runs it until `stop`.

    `GET /log` says when each stream that has finished since the last such call was received and
    sent, one JSON object a line; `GET /metrics` has the counters by which a ledger reads vLLM.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one, which `port` then says.
        pace: How fast streams go.

    Raises:
        OSError: The port is taken.
    """

    def __init__(self, host: str, port: int, pace: Pace) -> None:
        self._listener = socket.create_server((host, port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._pace = pace
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, _Connection] = {}
        self._unread: list[_Connection] = []
        self._due: list[tuple[int, int, _Connection]] = []
        self._order = 0
        self._log: list[Sent] = []
        self._counts: Counter[str] = Counter()
        self._stopped = False

    def stop(self, *_: int | FrameType | None) -> None:
        """Ends `serve` soon; fit for a signal handler."""
        self._stopped = True

    def serve(self) -> None:
        """Answers until `stop`, then closes every connection."""
        while not self._stopped:
            for descriptor, events in self._epoll.poll(self._wait_s(), _BACKLOG):
                self._handle(descriptor, events)
            # Every socket has its stamp before any request is read, which takes longer.
            while self._unread:
                self._take_requests(self._unread.pop())
            self._send_due()
        for connection in list(self._connections.values()):
            self._close(connection)
        self._epoll.close()
        self._listener.close()

    def _wait_s(self) -> float:
        if not self._due:
            return _IDLE_S
        left_ns = self._due[0][0] - monotonic_ns() - _SPIN_NS
        return min(_IDLE_S, max(0, left_ns // 1_000_000) / 1e3)

    def _handle(self, descriptor: int, events: int) -> None:
        if descriptor == self._listener.fileno():
            self._accept()
            return
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        if events & select.EPOLLOUT:
            self._drain(connection)
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and connection.is_open:
            self._receive(connection)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[sock.fileno()] = _Connection(sock)
            self._epoll.register(sock, select.EPOLLIN)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        connection.received += data
        connection.received_ns = monotonic_ns()
        self._unread.append(connection)

    def _take_requests(self, connection: _Connection) -> None:
        while connection.is_open and connection.sent is None and not connection.unsent:
            head, blank, _ = connection.received.partition(b"\r\n\r\n")
            if not blank:
                return
            first, *lines = bytes(head).decode("latin-1").split("\r\n")
            named = (line.partition(":") for line in lines)
            fields = {name.strip().lower(): value.strip() for name, _, value in named}
            end = len(head) + 4 + int(fields.get("content-length") or 0)
            if len(connection.received) < end:
                return
            body = bytes(connection.received[len(head) + 4 : end])
            del connection.received[:end]
            self._answer(connection, first, fields.get("x-request-id", ""), body)

    def _answer(self, connection: _Connection, first: str, request_id: str, body: bytes) -> None:
        method, path, _ = (first.split(" ") + ["", ""])[:3]
        if method != "POST" or not path.endswith("/completions"):
            self._write(connection, self._page(path))
            return
        try:
            asked = Asked.read(body, path.endswith("/chat/completions"))
        except ValueError as error:
            self._write(connection, plain(400, str(error).encode()))
            return
        self._counts["started"] += 1
        connection.sent = Sent(request_id, connection.received_ns, 0, 0, asked.tokens)
        pace, due_ns = self._pace, connection.received_ns + self._pace.ttft_ns
        if asked.stream:
            connection.parts = deque(sends(asked, pace.tokens_per_send))
        else:
            connection.parts = deque([whole(asked)])
            due_ns += pace.itl_ns * (asked.tokens - 1)
        self._at(due_ns, connection)

    def _page(self, path: str) -> bytes:
        path = path.partition("?")[0]
        if path == "/log":
            lines = [json.dumps(asdict(sent)) for sent in self._log]
            self._log.clear()
            return plain(200, "\n".join(lines).encode())
        pages = {
            "/metrics": _metrics(self._counts),  # whole, whatever names are asked for
            "/health": "",
            "/version": '{"version": "null"}',
        }
        pages["/v1/models"] = json.dumps({"object": "list", "data": [{"id": "null"}]})
        return plain(200, pages[path].encode()) if path in pages else plain(404, path.encode())

    def _at(self, due_ns: int, connection: _Connection) -> None:
        self._order += 1
        heapq.heappush(self._due, (due_ns, self._order, connection))

    def _send_due(self) -> None:
        for due_ns, connection in self._ripe():
            for _ in range(_WRITES):
                self._send_part(connection)
                if self._pace.itl_ns or connection.unsent or not connection.parts:
                    break
            if connection.parts and not connection.unsent:
                self._at(due_ns + self._pace.itl_ns, connection)
            self._take_requests(connection)

    def _ripe(self) -> Iterator[tuple[int, _Connection]]:
        """What is due now, each once: what falls due meanwhile waits until sockets were read."""
        now_ns, last = monotonic_ns(), self._order
        while self._due and self._due[0][0] <= now_ns and self._due[0][1] <= last:
            due_ns, _, connection = heapq.heappop(self._due)
            if connection.is_open:
                yield due_ns, connection

    def _send_part(self, connection: _Connection) -> None:
        part, sent = connection.parts.popleft(), connection.sent
        assert sent is not None
        sent.last_ns = monotonic_ns()
        sent.first_ns = sent.first_ns or sent.last_ns
        if not connection.parts:
            # Before the write: whoever has read the end may ask for the log at once.
            self._log.append(sent)
            self._counts["finished"] += 1
            connection.sent = None
        self._write(connection, part)

    def _write(self, connection: _Connection, data: bytes) -> None:
        connection.unsent = memoryview(data)
        self._flush(connection)
        if connection.is_open and connection.unsent:
            self._epoll.modify(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, connection: _Connection) -> None:
        try:
            connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._close(connection)

    def _drain(self, connection: _Connection) -> None:
        self._flush(connection)
        if not connection.is_open or connection.unsent:
            return
        self._epoll.modify(connection.sock, select.EPOLLIN)
        if connection.parts:
            self._at(monotonic_ns(), connection)
        else:
            self._take_requests(connection)

    def _close(self, connection: _Connection) -> None:
        if connection.sent is not None:
            self._counts["aborted"] += 1
        connection.is_open = False
        self._connections.pop(connection.sock.fileno(), None)
        connection.sock.close()


def _metrics(counts: Counter[str]) -> str:
    running = counts["started"] - counts["finished"] - counts["aborted"]
    return (
        f"vllm:num_requests_running {running}\n"
        "vllm:num_requests_waiting 0\n"
        f'vllm:request_success_total{{finished_reason="length"}} {counts["finished"]}\n'
        f'vllm:request_success_total{{finished_reason="abort"}} {counts["aborted"]}\n'
        f"vllm:e2e_request_latency_seconds_count {counts['finished'] + counts['aborted']}\n"
    )
