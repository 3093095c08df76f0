"""What decides a comparison beside parallelism: how many requests an arm admits, and lockstep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sweeps.results import Trial


def admitted(trial: Trial) -> int | None:
    """Sequences that the engines of a serving trial run at once; None where it is not known.

    Each data-parallel rank is an engine with its own `max_num_seqs`. A server that was there
    before has a limit that nobody told us.
    """
    config: dict[str, Any] = json.loads(trial.config_json or "{}")
    arm = (config.get("arm") or {}).get("arm") or {}
    if arm.get("kind") in (None, "attached") or "max_num_seqs" not in arm:
        return None
    return int(arm["max_num_seqs"]) * int(arm.get("dp", 1))


def equal_batch_remark(found: Sequence[Trial]) -> list[str]:
    """A paragraph where arms admit unlike numbers of requests and a cell passes the smaller."""
    limits = {t.label: limit for t in found if (limit := admitted(t)) is not None}
    if len(set(limits.values())) < 2:
        return []
    least = min(limits.values())
    if all((t.concurrency or 0) <= least for t in found):
        return []
    words = ", ".join(f"{arm} {limit}" for arm, limit in limits.items())
    return [
        f"Unequal batch: requests that the engines admit at once (`max_num_seqs` x engines): "
        f"{words}. Above c = {least} the figures compare admission limits as much as parallelism; "
        "an arm with an equal total belongs beside these."
    ]


def lockstep_remark(found: Sequence[Trial]) -> list[str]:
    """A paragraph where ranks that step together cannot all have the same number of requests.

    Ranks that share an expert collective run every step together: one without a request runs it
    on nothing, and the others wait for the one with the most.
    """
    uneven: dict[str, list[int]] = {}
    for trial in found:
        together = (trial.dp or 1) > 1 and (trial.ep or 1) > 1
        if together and trial.concurrency and trial.concurrency % (trial.dp or 1):
            uneven.setdefault(f"{trial.label} (DP {trial.dp})", []).append(trial.concurrency)
    if not uneven:
        return []
    words = "; ".join(
        f"{arm} at {', '.join(f'c = {c}' for c in sorted(set(cells)))}"
        for arm, cells in uneven.items()
    )
    return [
        "Lockstep: ranks that share an expert collective step together, so a concurrency that is "
        f"no multiple of DP leaves ranks idle or waiting: {words}."
    ]
