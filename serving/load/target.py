"""Where requests go: a server's address and path, and the bytes of a request to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from serving.load.records import Request

API_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """One HTTP server and the path that takes the load.

    Attributes:
        host: Name or address.
        port: TCP port.
        path: Path of the call, for example `/v1/completions`.
        tls: Whether the connection is HTTPS.
        name: What records call it.
    """

    host: str
    port: int
    path: str
    tls: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.authority)

    @property
    def authority(self) -> str:
        """`host:port` as the Host field has it, IPv6 addresses in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def parse(cls, base_url: str, api: str, name: str = "") -> Target:
        """Target from a base URL such as `http://node:8000`, with or without `/v1` at its end.

        Args:
            base_url: Scheme, host, optional port and optional path prefix.
            api: `completions` or `chat`.
            name: What records call it; `host:port` where it is empty.

        Raises:
            ValueError: The URL or the API is not one that the client can call.
        """
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base URL {base_url!r}: expected http://host:port or https://host")
        if api not in API_PATHS:
            raise ValueError(f"api {api!r}: expected one of {', '.join(API_PATHS)}")
        tls = url.scheme == "https"
        prefix = url.path.rstrip("/").removesuffix("/v1")
        port = url.port or (443 if tls else 80)
        return cls(url.hostname, port, prefix + API_PATHS[api], tls, name)


def request_bytes(target: Target, request: Request, extra_headers: Mapping[str, str]) -> bytes:
    """All bytes of one HTTP request. Built before a cell, so that sending is one write.

    Raises:
        ValueError: A header holds a line break or is not Latin-1.
    """
    fields = {
        "host": target.authority,
        "content-type": "application/json",
        "accept": "text/event-stream",
        "accept-encoding": "identity",
        **{name.lower(): value for name, value in extra_headers.items()},
        "content-length": str(len(request.body)),
        "x-request-id": request.request_id,
        "x-ep-ray-role": request.role,
    }
    if request.session is not None:
        fields["x-session-id"] = request.session
    lines = [f"POST {target.path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError(f"request {request.request_id}: a header or the path holds a line break")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + request.body
