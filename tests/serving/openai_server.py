"""A small OpenAI-compatible server on loopback, in threads, with the habits of several servers."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STANDARD = {
    "model", "prompt", "messages", "max_tokens", "temperature", "stream", "stream_options",
}  # fmt: skip


@dataclass
class Habits:
    """What a server offers and refuses.

    Attributes:
        models: Names that it lists.
        strict: Whether it refuses fields beyond OpenAI's.
        token_ids: Whether it takes prompts as token ids.
        chat_only: Whether it has no completions endpoint.
        ranks: How many engines share its requests in turn; each has its own `/metrics`.
        bodies: Requests as they came in.
    """

    models: tuple[str, ...] = ("m",)
    strict: bool = False
    token_ids: bool = True
    chat_only: bool = False
    ranks: int = 1
    version: str | None = "9.9"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    completed: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def refusal(self, path: str, body: dict[str, Any]) -> str | None:
        """Why a request is refused, or None."""
        if self.chat_only and "chat" not in path:
            return "no such endpoint"
        options = set(body.get("stream_options", {})) - {"include_usage"}
        unknown = sorted(set(body) - STANDARD) + sorted(options)
        if self.strict and unknown:
            return f"unknown fields {unknown}"
        if not self.token_ids and isinstance(body.get("prompt"), list):
            return "prompt must be text"
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    habits: Habits

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": name} for name in self.habits.models]})
        elif self.path == "/version" and self.habits.version:
            self._json(200, {"version": self.habits.version})
        elif found := re.fullmatch(r"/rank(\d+)/metrics(?:\?.*)?", self.path):
            self._reply(200, self._metrics(int(found[1])))
        else:
            self._json(404, {"error": f"no {self.path}"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.habits.lock:
            self.habits.bodies.append(body)
        refusal = self.habits.refusal(self.path, body)
        if refusal:
            self._json(400, {"error": {"message": refusal}})
        else:
            self._stream(body, "chat" in self.path)

    def _stream(self, body: dict[str, Any], chat: bool) -> None:
        count = body["max_tokens"]
        events = [_event(i + 1, count, chat) for i in range(count)]
        payload = b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in events)
        with self.habits.lock:
            self.habits.completed[sum(self.habits.completed.values()) % self.habits.ranks] += 1
        self._reply(200, payload + b"data: [DONE]\n\n", "text/event-stream")

    def _metrics(self, rank: int) -> bytes:
        with self.habits.lock:
            done = self.habits.completed[rank]
        name = 'vllm:request_success_total{finished_reason="length"}'
        return f"{name} {done}.0\nvllm:num_requests_running 0.0\n".encode()

    def _json(self, status: int, answer: object) -> None:
        self._reply(status, json.dumps(answer).encode(), "application/json")

    def _reply(self, status: int, payload: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def _event(index: int, count: int, chat: bool) -> dict[str, Any]:
    text = {"delta": {"content": "x"}} if chat else {"text": "x"}
    choice = {**text, "finish_reason": "length" if index == count else None}
    return {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": index}}


@contextmanager
def openai_server(habits: Habits) -> Iterator[str]:
    """Serves until the end of the block; gives the base URL."""
    handler = type("Handler", (_Handler,), {"habits": habits})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
