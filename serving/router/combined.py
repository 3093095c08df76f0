"""What the processes of one router say together. Pure: plain documents in, plain documents out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

ALL_PROCESSES: Final = "all processes"
"""What a status document's counts are of, where they are whole."""

Counters = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Endpoint -> role -> counter -> count, as `Router.counters` gives them."""

_CIRCUITS: Final = ("closed", "half_open", "open")  # from the best to the worst


def sum_counters(parts: Iterable[Counters]) -> dict[str, dict[str, dict[str, int]]]:
    """Counts of all processes, by endpoint, role and counter.

    A process has an endpoint's role only once it had a request of it.
    """
    found: dict[str, dict[str, Counter[str]]] = {}
    for part in parts:
        for name, roles in part.items():
            sums = found.setdefault(name, {})
            for role, tally in roles.items():
                sums.setdefault(role, Counter()).update(tally)
    return {name: {role: dict(t) for role, t in sums.items()} for name, sums in found.items()}


def combine_status(name: str, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The status document of a router from those of its processes; keys as in `Router.status`.

    An endpoint is registered, healthy and in selection only where it is so in every process, and
    its circuit is the worst of theirs. Counts are sums.

    Args:
        name: Of the whole router.
        documents: Each process's own. Their owner declares the same to all of them.
    """
    parts = [{e["name"]: e for e in document["endpoints"]} for document in documents]
    endpoints = [_combine([part[endpoint] for part in parts]) for endpoint in parts[0]]
    unrouted: Counter[str] = Counter()
    for document in documents:
        unrouted.update(document["unrouted"])
    return {
        **documents[0],
        "name": name,
        "draining": any(document["draining"] for document in documents),
        "ready_endpoints": sum(endpoint["in_selection"] for endpoint in endpoints),
        "counts_of": ALL_PROCESSES,
        "unrouted": dict(unrouted),
        "endpoints": endpoints,
    }


def _combine(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One endpoint as all processes see it."""
    everywhere = ("registered", "healthy", "in_selection")
    name = parts[0]["name"]
    return {
        "name": name,
        "url": parts[0]["url"],
        **{key: all(part[key] for part in parts) for key in everywhere},
        "circuit": max((part["circuit"] for part in parts), key=_CIRCUITS.index),
        "in_flight": sum(part["in_flight"] for part in parts),
        "counters": sum_counters({name: part["counters"]} for part in parts)[name],
    }
