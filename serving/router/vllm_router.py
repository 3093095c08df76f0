"""The `vllm-router` package as a process: its program, its command line, its start and its end.

It is another project's router, run so that what it costs can be compared: on round robin, with
retries, circuit breaker and removal of unhealthy ranks off, without a limit on requests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from serving import engine_http
from serving.engine_process import ServerProcess
from serving.ports import router_claims
from serving.router.endpoint import url_of
from serving.router.router import RouterError

PROGRAM: Final = "vllm-router"
WRITTEN_FOR: Final = "0.1.17"
"""The version whose flags and pages these are."""

START_S: Final = 30.0
"""Deadline from its start until it says that it has every rank."""

_POLL_S: Final = 0.05
_PAGE_S: Final = 5.0
_TAIL_LINES: Final = 20
_LIMITLESS: Final = 2**31 - 1  # of what has no flag that turns it off


def find_program(asked: str | None) -> str:
    """Absolute path of the program.

    Args:
        asked: `router.executable`: a path, or a name on PATH. None takes `vllm-router` beside this
            Python, else on PATH.

    Raises:
        RouterError: There is no such program; says how to get it.
    """
    beside = Path(sys.executable).parent / PROGRAM
    tried = [asked] if asked else [str(beside), PROGRAM]
    for name in tried:
        if found := shutil.which(os.path.expanduser(name)):
            return str(Path(found).absolute())
    where = f"router.executable={asked}" if asked else "router=vllm_router"
    place = asked if asked else f"{beside}, nor {PROGRAM} on PATH"
    raise RouterError(
        f"asked: {where}; found: no program {place}. `pip install {PROGRAM}=={WRITTEN_FOR}`, or "
        "name it with router.executable=PATH"
    )


def version_of(program: str) -> str:
    """Version of the package that a program was installed with; `unknown` where it is elsewhere."""
    root = Path(program).resolve().parent.parent
    for folder in sorted(root.glob("lib/python*/site-packages/vllm_router-*.dist-info")):
        if found := re.search(r"^Version: (\S+)", (folder / "METADATA").read_text(), re.M):
            return found[1]
    return "unknown"


def arguments(host: str, port: int, metrics_port: int, urls: Sequence[str]) -> list[str]:
    """The command line behind the program's name, for ranks at these URLs."""
    off = str(_LIMITLESS)
    return [
        *("--host", host, "--port", str(port), "--policy", "round_robin"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--disable-retries", "--disable-circuit-breaker", "--health-failure-threshold", off),
        *("--max-concurrent-requests", off, "--request-timeout-secs", "86400"),
        *("--log-level", "error", "--worker-urls", *urls),
    ]


class VllmRouter:
    """A router that is up, or can be brought up. Nothing of it survives this process.

    Args:
        program: From `find_program`.
        host: Address to listen on.
        port: `router.port` of the experiment; `serving.ports` says which ones it takes.
        log: Where its output goes.
    """

    def __init__(self, program: str, host: str, port: int, log: Path) -> None:
        self._program, self._host, self._log = program, host, log
        self._port, self._metrics_port = (
            claim.first for claim in router_claims(host, port, {"vllm_router"})
        )
        self._process: ServerProcess | None = None
        self._endpoints: list[tuple[str, str]] = []
        self.url = url_of(host, self._port)

    def start(self, endpoints: Sequence[tuple[str, str]], deadline_s: float = START_S) -> str:
        """Starts it in front of endpoints, (name, URL) each. Returns its URL once it has them all.

        It keeps to the cores of the calling thread.

        Raises:
            RouterError: It ended, or did not have every endpoint at the deadline.
        """
        self._endpoints = list(endpoints)
        urls = [url for _, url in endpoints]
        given = arguments(self._host, self._port, self._metrics_port, urls)
        self._process = ServerProcess(given, _without_proxies(os.environ), self._log, self._program)
        deadline = time.monotonic() + deadline_s
        while not (said := self._ready(len(urls))):
            if self.exit_code() is not None:
                raise self._error(f"ended with exit code {self.exit_code()}")
            if time.monotonic() > deadline:
                raise self._error(f"did not have its {len(urls)} ranks within {deadline_s:g} s")
            time.sleep(_POLL_S)
        return said

    def _ready(self, ranks: int) -> str:
        """Its URL once it says that it has so many ranks; empty before."""
        try:
            page = _page(f"{self.url}/readiness")
        except (OSError, ValueError):
            return ""
        return self.url if page.get("healthy_workers") == ranks else ""

    def _error(self, what: str) -> RouterError:
        tail = self._process.tail(_TAIL_LINES) if self._process else ""
        return RouterError(
            f"{self._program} {what} (ports {self._port} and {self._metrics_port}, moved by "
            f"router.port=)\nThe end of {self._log}:\n{tail}"
        )

    def exit_code(self) -> int | None:
        """None while it runs; else how it ended. 0 before its start."""
        return self._process.exit_code() if self._process else 0

    def pid(self) -> int | None:
        """Its process id; None before its start."""
        return self._process.pid if self._process else None

    def status(self) -> dict[str, Any]:
        """What it says of itself, in the form of `Router.status`; what it does not say is absent.

        Raises:
            RouterError: It does not answer.
        """
        try:
            listed = {w["url"]: w for w in _page(f"{self.url}/workers")["workers"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._error(f"does not say which ranks it has: {error!r}") from error
        endpoints = [
            {
                "name": name,
                "url": url,
                "registered": url in listed,
                "healthy": listed.get(url, {}).get("is_healthy"),
            }
            for name, url in self._endpoints
        ]
        return {
            "url": self.url,
            "policy": "vllm_router",
            "desired_endpoints": len(endpoints),
            "ready_endpoints": sum(bool(e["registered"] and e["healthy"]) for e in endpoints),
            "endpoints": endpoints,
        }

    def stop(self, grace_s: float = 5.0) -> list[int]:
        """Ends it and everything that it started. Returns pids that would not die."""
        return self._process.stop(grace_s) if self._process else []


def _page(url: str) -> dict[str, Any]:
    """A JSON object of its pages. Raises OSError, or ValueError where it is none."""
    found = json.loads(engine_http.get(url, _PAGE_S))
    if not isinstance(found, dict):
        raise ValueError(f"{url} gave no JSON object")
    return found


def _without_proxies(environ: Mapping[str, str]) -> dict[str, str]:
    """Ranks are asked directly, whatever proxy this machine goes out by."""
    return {key: value for key, value in environ.items() if not key.lower().endswith("_proxy")}
