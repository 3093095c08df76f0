"""How evenly the ranks of a cell were busy, from readings of their running requests. Pure.

Ranks that share an expert collective run every step together. One without a request runs a dummy
batch, and a step takes as long as the largest batch needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from serving.load.records import CellRecord, clock_offset_ns
from serving.running import Reading

Engine = tuple[str, int | None]  # endpoint, and vLLM's index of the engine behind it
_Batches = Mapping[int, Mapping[Engine, Reading]]  # by the time of asking


def lockstep_tables(
    readings: Sequence[Reading], record: CellRecord, endpoints: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Rows of the tables `running` and `lockstep` of a cell; none where nothing was read.

    Args:
        readings: With stamps of this host.
        record: What the client did meanwhile, perhaps on another host.
        endpoints: Ranks in rank order; one that never answered gets a row without readings.
    """
    shift_ns = clock_offset_ns() - record.clock_offset_ns
    stamped = [replace(r, monotonic_ns=r.monotonic_ns + shift_ns) for r in readings]
    first_ns = record.first_sent_ns
    if not stamped or first_ns is None:
        return {}
    measured = [r for r in stamped if first_ns <= r.monotonic_ns <= first_ns + record.wall_ns]
    return {
        "running": [asdict(reading) for reading in stamped],
        "lockstep": lockstep_rows(measured, _engines(stamped, endpoints)),
    }


def lockstep_rows(readings: Sequence[Reading], engines: Sequence[Engine]) -> list[dict[str, Any]]:
    """Rows of the `lockstep` table, one per engine.

    Args:
        readings: Those of the measured part of a cell.
        engines: All engines of the group, in rank order.
    """
    batches: dict[int, dict[Engine, Reading]] = {}
    for reading in readings:
        of_asking = batches.setdefault(reading.monotonic_ns, {})
        of_asking[reading.endpoint, reading.engine] = reading
    group = {"skew": skew(batches, len(engines))}
    return [_row(engine, batches) | group for engine in engines]


def skew(batches: _Batches, engines: int) -> float | None:
    """Sum of the largest batches over the sum of the mean batches, over readings of all ranks.

    1 where all ranks run equally many requests at all times, and as many as there are ranks where
    one runs them all. A reading that lacks a rank is left out.

    Returns:
        None where nothing ran in any reading that is whole.
    """
    whole = [
        [reading.running for reading in answers.values()]
        for answers in batches.values()
        if len(answers) == engines
    ]
    total = sum(map(sum, whole))
    return sum(map(max, whole)) * engines / total if total else None


def _row(engine: Engine, batches: _Batches) -> dict[str, Any]:
    own = {asked_ns: answers[engine] for asked_ns, answers in batches.items() if engine in answers}
    at_work = [reading for asked_ns, reading in own.items() if _works(batches[asked_ns].values())]
    running = [reading.running for reading in own.values()]
    return {
        "endpoint": engine[0],
        "engine": engine[1],
        "readings": len(own),
        "at_work": len(at_work),
        "idle": sum(not reading.running for reading in at_work),
        "running_mean": _mean(running),
        "running_max": max(running, default=None),
        "waiting_mean": _mean([reading.waiting for reading in own.values()]),
    }


def _works(answers: Iterable[Reading]) -> bool:
    return any(reading.running or reading.waiting for reading in answers)


def _mean(counts: Sequence[int]) -> float | None:
    return sum(counts) / len(counts) if counts else None


def _engines(readings: Sequence[Reading], endpoints: Sequence[str]) -> list[Engine]:
    """Engines that ever answered, in rank order; an endpoint that never did stands for one."""
    found: list[Engine] = []
    for endpoint in endpoints:
        known = {r.engine for r in readings if r.endpoint == endpoint}
        found += [(endpoint, e) for e in sorted(known, key=lambda e: -1 if e is None else e)]
        found += [] if known else [(endpoint, None)]
    return found
