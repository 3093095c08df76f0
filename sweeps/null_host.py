"""An arm of null engines: no model, a fixed pace. What varies is client and router."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ep_ray.config.schema import Config, RouterPolicy
from ep_ray.inventory import local_machine, versions
from ep_ray.transport import Evidence
from ep_ray.watchdog import TrialError
from serving import engine_http
from serving.engine_http import Counters
from serving.load.prompts import CallSpec
from serving.load.records import CellRecord, Request
from serving.null_engine import Running, running
from serving.null_server import AS_A_MODEL
from sweeps.call import call_spec
from sweeps.front import Front
from sweeps.host import Counts
from sweeps.outcome import status_rows, what_ran
from sweeps.trial import ServingTrial

_VOCAB = 100_000  # ids that an engine without a model takes
_ANY_TOKEN = 1
_TIMEOUT_S = 30.0


class NullHost:
    """`dp` null engines on the driver's machine; implements `sweeps.host.Host`.

    Args:
        config: The experiment.
        trial: Any trial of the arm.
        routers: Policies that its trials ask for.
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
        self._engines: dict[str, Running] = {}
        self._processes = ExitStack()
        self._front: Front | None = None
        self._fronts = 0

    def start(self) -> None:
        """Starts the engines and what stands in front of them.

        Raises:
            TrialError: Something of it did not come up; nothing of it is left.
        """
        self._fronts += 1
        name = self._arm.name + (f":{self._fronts}" if self._fronts > 1 else "")
        try:
            for rank in range(self._arm.dp):
                engine = self._processes.enter_context(running(AS_A_MODEL))
                self._engines[f"engine:{self._arm.name}:rank{rank}"] = engine
            layout = {"kind": self._arm.kind.name, "tp": 1, "dp": self._arm.dp, "ep": False}
            self._front = Front(
                self._config, name, self._policies, self.rank_urls(), layout, self._logs
            )
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError | OSError) and not isinstance(error, TrialError):
                raise TrialError("crash", f"the null engines: {error}") from error
            raise

    def endpoints(self) -> list[str]:
        """Names of the engines, in rank order."""
        return list(self._engines)

    def rank_urls(self) -> list[tuple[str, str]]:
        """Their names and base URLs; they have vLLM's gauges."""
        return [(rank, engine.url) for rank, engine in self._engines.items()]

    def call(self, trial: ServingTrial) -> CallSpec:
        """What is asked of them; they take any token id."""
        vocab_size = self._config.model.vocab_size or _VOCAB
        return call_spec(self._config, trial, "null", vocab_size)

    def send(self, trial: ServingTrial, requests: Sequence[Request]) -> CellRecord:
        """Sends a cell's load. Raises `TrialError` if a router dies or a deadline passes."""
        assert self._front is not None
        return self._front.send(trial, requests, self._front.check_alive)

    def counts(self, trial: ServingTrial) -> Counts:
        """Counters of the trial's router and of the engines.

        Raises:
            TrialError: An engine or the router is gone.
        """
        assert self._front is not None
        engines = {rank: _settled(engine.url) for rank, engine in self._engines.items()}
        return Counts(self._front.counters(trial), engines)

    def standing(self, trial: ServingTrial) -> list[dict[str, Any]]:
        """What the trial's router says of each engine, and whether it answers by itself."""
        assert self._front is not None
        probes = {rank: _token(engine.url) for rank, engine in self._engines.items()}
        return status_rows(self._front.status(trial), probes)

    def mend(self) -> None:
        """Starts everything anew: nothing of it is dear. Raises `TrialError` if it fails."""
        self.close()
        self.start()

    def evidence(self) -> list[Evidence]:
        """Nothing: there are no experts."""
        return []

    def expert_bytes(self, record: CellRecord) -> int | None:
        """Not defined: there are no experts."""
        return None

    def what_ran(self) -> dict[str, Any]:
        """Versions of what stands in front of the engines, and this machine."""
        machine = local_machine()
        found = {k: v for k, v in versions().items() if not k.startswith("vllm")}
        found |= self._front.versions() if self._front is not None else {}
        return what_ran(found, {"machines": {machine.hostname: machine.as_dict()}}, {}, machine.cpu)

    def close(self) -> list[str]:
        """Ends routers, client and engines."""
        if self._front is not None:
            self._front.close()
        self._front = None
        self._processes.close()
        self._engines = {}
        return []


def _settled(url: str) -> Counters:
    try:
        return engine_http.stable_counters(lambda: engine_http.counters(url), _TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise TrialError("crash", f"counters of the null engine at {url}: {error}") from error


def _token(url: str) -> int | str:
    """Nanoseconds to one token, or why none came."""
    asked_ns = time.monotonic_ns()
    try:
        engine_http.generate_one_token(url, "null", _ANY_TOKEN, _TIMEOUT_S)
    except (OSError, ValueError) as error:
        return str(error)
    return time.monotonic_ns() - asked_ns
