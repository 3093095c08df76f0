"""What a ledger cannot say of the routers of a sweep, in words beside it."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.results import Trial, labels


def router_remarks(found: Sequence[Trial]) -> list[str]:
    """Paragraphs on arms whose router does not count as ep-ray's own does."""
    foreign = labels([trial for trial in found if trial.router == "vllm_router"])
    if not foreign:
        return []
    return [
        f"Router `vllm_router` ({', '.join(foreign)}): it counts no request by role and names no "
        "rank to the client, so its columns are blank. With several ranks the client's total is "
        "compared with the sum of the engines' counters, and nothing is judged rank by rank."
    ]
