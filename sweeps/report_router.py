"""What a ledger cannot say of the routers of a sweep, in words beside it."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.results import Trial, labels


def router_remarks(found: Sequence[Trial]) -> list[str]:
    """Paragraphs on arms whose router does not count as one process of ep-ray's own does."""
    return [*_foreign(found), *_several(found)]


def router_processes(found: Sequence[Trial]) -> list[tuple[str, str, int]]:
    """Arm, policy and processes of each router that runs as more than one process."""
    several = [trial for trial in found if (trial.router_processes or 1) > 1]
    return list(dict.fromkeys((t.label, t.router or "", t.router_processes or 1) for t in several))


def _foreign(found: Sequence[Trial]) -> list[str]:
    foreign = labels([trial for trial in found if trial.router == "vllm_router"])
    if not foreign:
        return []
    return [
        f"Router `vllm_router` ({', '.join(foreign)}): it counts no request by role and names no "
        "rank to the client, so its columns are blank. With several ranks the client's total is "
        "compared with the sum of the engines' counters, and nothing is judged rank by rank."
    ]


def _several(found: Sequence[Trial]) -> list[str]:
    arms = [f"{arm}: {count} processes" for arm, _, count in router_processes(found)]
    if not arms:
        return []
    return [
        f"Router of several processes on one port ({', '.join(arms)}): its columns are their "
        "sums. Each process takes turns for itself, so that in a cell under round_robin two ranks "
        "may differ by that many requests, where one process is exact."
    ]
