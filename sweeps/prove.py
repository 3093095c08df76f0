"""Puts the proof of the transport into a trial's outcome; another transport fails the trial."""

from __future__ import annotations

from collections.abc import Sequence

from ep_ray.config.schema import TransportKind
from ep_ray.transport import Evidence, judge
from sweeps.outcome import Outcome, evidence_rows


def prove(
    outcome: Outcome,
    asked: TransportKind,
    evidence: Sequence[Evidence],
    *,
    crosses: bool,
    local_links: bool,
) -> None:
    """Judges the evidence and records it.

    Args:
        outcome: Gets the rows, the verdict, and an error where the verdict is `contradicted`.
        asked: The transport of the arm.
        evidence: Of all ranks and machines.
        crosses: Whether anything crosses between ranks at all.
        local_links: Whether faster links inside a TP group are part of the arm.
    """
    status, seen = judge(asked, evidence, local_links) if crosses else ("not_applicable", "")
    outcome.rows["transport"] = evidence_rows(evidence)
    outcome.facts |= {"transport_status": status, "transport_seen": seen}
    if status == "contradicted" and outcome.status == "ok":
        outcome.status = "failed"
        outcome.error = f"asked for transport {asked.name}, seen {seen}"
