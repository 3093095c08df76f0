"""An arm that runs already: load is sent, through a router where one is asked for.

What cannot be known of it stays blank.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ep_ray.config.schema import Config, RouterPolicy
from ep_ray.inventory import versions
from ep_ray.transport import Evidence
from ep_ray.watchdog import TrialError
from serving import engine_http
from serving.attached import AttachedServer, AttachError, attach
from serving.engine_http import Counters
from serving.load.prompts import CallSpec
from serving.load.records import CellRecord, Request
from serving.load.target import Target
from sweeps.call import call_spec
from sweeps.front import Front
from sweeps.host import Counts
from sweeps.outcome import status_rows, what_ran
from sweeps.trial import ServingTrial

_COUNTERS_S = 30.0
_TOKEN_S = 30.0
_ANY_TOKEN = 1


class AttachedHost:
    """A running server; implements `sweeps.host.Host`.

    Args:
        config: The experiment.
        trial: Any trial of the arm.
        routers: Policies that its trials ask for; the routers stand in front of `rank_urls`.
        folder: The sweep's folder; logs go to `logs/` in it.
    """

    def __init__(
        self,
        config: Config,
        trial: ServingTrial,
        routers: Collection[RouterPolicy],
        folder: Path,
    ) -> None:
        self._config = config
        self._arm = trial.layout
        self._policies = set(routers) - {RouterPolicy.none}
        self._logs = folder / "logs"
        self._front: Front | None = None
        self._fronts = 0
        self._server: AttachedServer | None = None

    def start(self) -> None:
        """Gets to know the server, and starts what stands in front of it.

        Raises:
            TrialError: It takes no request, or a router or the client does not come up.
        """
        self._server = self.look()
        self._fronts += 1
        name = self._arm.name + (f":{self._fronts}" if self._fronts > 1 else "")
        endpoints = [(url, url.rstrip("/")) for url in self.endpoints()]
        direct = [Target.parse(self._arm.url or "", self._config.load.api.name)]
        self._front = Front(self._config, name, self._policies, endpoints, {}, self._logs, direct)

    def look(self) -> AttachedServer:
        """What the server is. Raises `TrialError` if it takes no request."""
        config = self._config
        try:
            return attach(
                self._arm.url or "",
                config.load.api.name,
                config.model.name,
                config.model.vocab_size,
            )
        except AttachError as error:
            raise TrialError("failed", str(error)) from error

    def endpoints(self) -> list[str]:
        """The ranks' URLs where they are given, else the server's."""
        return list(self._arm.rank_urls) or [self._arm.url or ""]

    def rank_urls(self) -> list[tuple[str, str]]:
        """The ranks whose URLs are given; what stands behind one for all of them is not known."""
        return [(url, url.rstrip("/")) for url in self._arm.rank_urls]

    def call(self, trial: ServingTrial) -> CallSpec:
        """Token-id prompts where the vocabulary is known and ids are taken, else text."""
        server = self._server
        assert server is not None
        vocab_size = self._config.model.vocab_size if server.token_prompts else None
        return call_spec(self._config, trial, server.model, vocab_size, server.strict)

    def send(self, trial: ServingTrial, requests: Sequence[Request]) -> CellRecord:
        """Sends a cell's load. Raises `TrialError` if a router dies or a deadline passes."""
        assert self._front is not None
        return self._front.send(trial, requests, self._front.check_alive)

    def counts(self, trial: ServingTrial) -> Counts:
        """Counters of the trial's router, and of the ranks whose URLs are given."""
        urls = self._arm.rank_urls
        engines = {url: self._settled(url) for url in urls} if urls else None
        return Counts(self._front.counters(trial) if self._front else None, engines)

    def _settled(self, url: str) -> Counters:
        try:
            return engine_http.stable_counters(lambda: engine_http.counters(url), _COUNTERS_S)
        except (OSError, ValueError) as error:
            raise TrialError(
                "failed", f"counters of rank {url} (arm.rank_urls): {error}"
            ) from error

    def standing(self, trial: ServingTrial) -> list[dict[str, Any]]:
        """What the trial's router says of each rank, and whether the rank generates a token.

        Nothing without one: its ranks may take no requests; nor where they take no token ids.
        """
        assert self._front is not None
        assert self._server is not None
        if trial.router is RouterPolicy.none or not self._server.token_prompts:
            return []
        probes = {url: self._token(url.rstrip("/")) for url in self.endpoints()}
        return status_rows(self._front.status(trial), probes)

    def _token(self, url: str) -> int | str:
        """Nanoseconds to one token of a rank asked directly, or why none came."""
        assert self._server is not None
        asked_ns = time.monotonic_ns()
        try:
            engine_http.generate_one_token(url, self._server.model, _ANY_TOKEN, _TOKEN_S)
        except (OSError, ValueError) as error:
            return str(error)
        return time.monotonic_ns() - asked_ns

    def mend(self) -> None:
        """Replaces routers and client. Raises `TrialError` if the server takes no request now."""
        self.close()
        self.start()

    def evidence(self) -> list[Evidence]:
        """Nothing: what is behind a URL cannot be seen from outside."""
        return []

    def expert_bytes(self, record: CellRecord) -> int | None:
        """Not known: the layout behind a URL cannot be seen from outside."""
        return None

    def what_ran(self) -> dict[str, Any]:
        """The client's versions; hardware and environment of the server are not known."""
        assert self._server is not None
        found = {k: v for k, v in versions().items() if not k.startswith("vllm")}
        if self._server.version:
            found["server"] = self._server.version
        if self._front is not None:
            found |= self._front.versions()
        return what_ran(found, {}, {}, "")

    def close(self) -> list[str]:
        """Ends routers and client; the server stays as it is."""
        if self._front is not None:
            self._front.close()
            self._front = None
        return []
