"""What a block of serving cells needs of the arm that it measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ep_ray.transport import Evidence
from serving.engine_http import Counters
from serving.load.prompts import CallSpec
from serving.load.records import CellRecord, Request
from sweeps.trial import ServingTrial


@dataclass(frozen=True)
class Counts:
    """Running counters of router and engines; None where there are none to read."""

    router: Mapping[str, Any] | None
    engines: Mapping[str, Counters] | None


class Host(Protocol):
    """An arm that is up, or can be brought up."""

    def start(self) -> None:
        """Brings the arm up; raises `TrialError` and leaves nothing if it does not come."""

    def endpoints(self) -> list[str]:
        """Names of the ranks, in rank order, as the ledger calls them."""

    def rank_urls(self) -> list[tuple[str, str]]:
        """Name and base URL of each rank that says at `/metrics` how many requests it runs."""

    def call(self, trial: ServingTrial) -> CallSpec:
        """What every request of a cell asks for."""

    def send(self, trial: ServingTrial, requests: Sequence[Request]) -> CellRecord:
        """Sends a cell's load; raises `TrialError` if the arm dies or a deadline passes."""

    def counts(self, trial: ServingTrial) -> Counts:
        """Counters of the trial's router and of the engines, settled."""

    def standing(self, trial: ServingTrial) -> list[dict[str, Any]]:
        """Rows of the `status` table but for `when`; empty where nothing can be asked."""

    def mend(self) -> None:
        """Makes the arm whole again while its engines still serve, at the cost of a token each.

        Raises:
            TrialError: They do not, or what stands in front of them does not come up again.
        """

    def evidence(self) -> list[Evidence]:
        """What the ranks' logs say about the transport of the experts' traffic."""

    def expert_bytes(self, record: CellRecord) -> int | None:
        """The least that a cell's experts sent between ranks; None where it is not known."""

    def what_ran(self) -> dict[str, Any]:
        """Columns of `trials` about versions, hardware and environment."""

    def close(self) -> list[str]:
        """Ends the arm; returns what is left, in words."""
