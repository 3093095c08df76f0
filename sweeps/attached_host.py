"""An arm that runs already: only load is sent, and what cannot be known stays blank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ep_ray.config.schema import Config
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
from sweeps.driver import Driver
from sweeps.host import Counts
from sweeps.outcome import what_ran
from sweeps.trial import ServingTrial

_COUNTERS_S = 30.0


class AttachedHost:
    """A running server; implements `sweeps.host.Host`.

    Args:
        config: The experiment.
        trial: Any trial of the arm.
    """

    def __init__(self, config: Config, trial: ServingTrial) -> None:
        self._config = config
        self._arm = trial.layout
        self._driver: Driver | None = None
        self._server: AttachedServer | None = None

    def start(self) -> None:
        """Gets to know the server.

        Raises:
            TrialError: It takes no request.
        """
        self._server = self.look()
        self._driver = Driver(self._arm.name)

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

    def call(self, trial: ServingTrial) -> CallSpec:
        """Token-id prompts where the vocabulary is known and ids are taken, else text."""
        server = self._server
        assert server is not None
        vocab_size = self._config.model.vocab_size if server.token_prompts else None
        return call_spec(self._config, trial, server.model, vocab_size, server.strict)

    def send(self, trial: ServingTrial, requests: Sequence[Request]) -> CellRecord:
        """Sends a cell's load. Raises `TrialError` if a deadline passes."""
        assert self._driver is not None
        target = Target.parse(self._arm.url or "", self._config.load.api.name)
        return self._driver.send([target], requests, trial, self._config, lambda: None)

    def counts(self, _: ServingTrial) -> Counts:
        """Counters of the ranks whose URLs are given; a foreign router's are not known."""
        if not self._arm.rank_urls:
            return Counts(None, None)
        return Counts(None, {url: self._settled(url) for url in self._arm.rank_urls})

    def _settled(self, url: str) -> Counters:
        try:
            return engine_http.stable_counters(lambda: engine_http.counters(url), _COUNTERS_S)
        except (OSError, ValueError) as error:
            raise TrialError(
                "failed", f"counters of rank {url} (arm.rank_urls): {error}"
            ) from error

    def standing(self, _: ServingTrial) -> list[dict[str, Any]]:
        """Nothing: a foreign router's status is not known, and its ranks may take no requests."""
        return []

    def mend(self) -> None:
        """Replaces the load client. Raises `TrialError` if the server takes no request any more."""
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
        return what_ran(found, {}, {}, "")

    def close(self) -> list[str]:
        """Ends the load client; the server stays as it is."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None
        return []
