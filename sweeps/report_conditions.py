"""Under which conditions a sweep ran: versions, hardware, environment and readings of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from sweeps.report_router import router_processes
from sweeps.tablefmt import Block, Section, Table, text_table
from sweeps.view import View

_BRIEF_VERSIONS = ("torch", "vllm", "server", "ray")
_MOST_VALUES = 4  # of one variable over ranks
_COLUMNS = ("host", "CPU", "cores", "memory GiB", "GPUs", "InfiniBand", "EFA", "interfaces")


def sections(view: View) -> list[Section]:
    """Everything that was recorded about where and with what the sweep ran."""
    blocks = [*_machines(view), *_placement(view), *_routers(view)]
    blocks += [*_versions(view), *_env(view)]
    return [Section("What it ran on", (*blocks, *_telemetry(view)) or ("Not recorded.",))]


def sentence(view: View) -> str:
    """Devices, the versions that matter most, and load clients if not one, in one sentence."""
    devices = dict.fromkeys(t.device for t in view.trials if t.device)
    hosts = len(_hosts(view))
    parts = [" and ".join(devices) or "an unrecorded device"]
    parts += [f"{hosts} machine{'s' if hosts > 1 else ''}"] if hosts else []
    for name in _BRIEF_VERSIONS:
        found = dict.fromkeys(v for t in view.trials if (v := _json(t.versions_json).get(name)))
        parts += [f"{name} {' and '.join(map(str, found))}"] if found else []
    clients = dict.fromkeys(t.clients for t in view.trials if (t.clients or 1) > 1)
    parts += [f"load from {' and '.join(map(str, clients))} client processes"] if clients else []
    return f"On {', '.join(parts)}."


def _json(text: str | None) -> dict[str, Any]:
    """A JSON object; anything else is kept under an empty name."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = text
    return found if isinstance(found, dict) else {"": found}


def _hosts(view: View) -> dict[str, Mapping[str, Any]]:
    """Machines by host name."""
    found: dict[str, Mapping[str, Any]] = {}
    for trial in view.trials:
        found |= _json(trial.hardware_json).get("machines") or {}
    return found


def _machines(view: View) -> list[Table]:
    rows = [
        (
            *(host, m.get("cpu"), m.get("cores"), m.get("memory_gib"), _gpus(m.get("gpus") or [])),
            *[", ".join(m.get(name) or []) or "none" for name in ("ib", "efa", "interfaces")],
        )
        for host, m in _hosts(view).items()
    ]
    return [text_table("Machines", _COLUMNS, rows)] if rows else []


def _gpus(found: Iterable[Mapping[str, Any]]) -> str:
    counts = Counter(f"{g.get('name')} ({g.get('memory_mib', 0) / 1024:.0f} GiB)" for g in found)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


def _placement(view: View) -> list[Table]:
    """Where the ranks of each arm and EP size stood."""
    rows = dict.fromkeys(
        (trial.label, trial.ep, _placed(ranks))
        for trial in view.trials
        if (ranks := _json(trial.hardware_json).get("ranks"))
    )
    return [text_table("Ranks", ("arm", "EP", "placed on"), list(rows))] if rows else []


def _placed(ranks: Iterable[Mapping[str, Any]]) -> str:
    """`node-a: 4 ranks (GPU 0 1 2 3); node-b: ...`."""
    hosts: dict[str, list[Any]] = {}
    for rank in ranks:
        hosts.setdefault(str(rank.get("hostname")), []).append(rank.get("gpu_index"))
    words = []
    for host, gpus in hosts.items():
        known = " ".join(str(gpu) for gpu in gpus if gpu is not None)
        words.append(f"{host}: {len(gpus)} ranks" + (f" (GPU {known})" if known else ", no GPU"))
    return "; ".join(words)


def _routers(view: View) -> list[Table]:
    """Arms whose router is more than one process."""
    rows = router_processes(view.trials)
    columns = ("arm", "policy", "processes on one port")
    return [text_table("Routers of several processes", columns, rows)] if rows else []


def _versions(view: View) -> list[Table]:
    """Versions, and hardware of no known form: each value with the arms that had it."""
    facts = _Facts()
    for trial in view.trials:
        for name, value in _json(trial.versions_json).items():
            facts.add(trial.label, name, value)
        for name, value in _json(trial.hardware_json).items():
            if name not in ("machines", "ranks"):
                facts.add(trial.label, f"hardware {name}".strip(), value)
    return facts.table("Versions", "name")


def _env(view: View) -> list[Table]:
    """Effective variables: each value with the arms that had it, all ranks in one line."""
    facts = _Facts()
    for trial in view.trials:
        for rank in _json(trial.env_json).values():
            for name, value in (rank if isinstance(rank, dict) else {}).items():
                facts.add(trial.label, name, value)
    return facts.table("Environment, all ranks together", "variable")


class _Facts:
    """Named values of each arm; an arm may have had several of one name."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], dict[str, None]] = {}

    def add(self, arm: str, name: str, value: object) -> None:
        self._values.setdefault((name, arm), {})[str(value)] = None

    def table(self, title: str, heading: str) -> list[Table]:
        """One line for each name and value, with the arms that had it."""
        arms: dict[tuple[str, str], list[str]] = {}
        for (name, arm), values in self._values.items():
            arms.setdefault((name, _listed(list(values))), []).append(arm)
        everyone = {arm for _, arm in self._values}
        rows = [
            (*entry, "all" if set(seen) == everyone else ", ".join(seen))
            for entry, seen in sorted(arms.items())
        ]
        return [text_table(title, (heading, "value", "arms"), rows)] if rows else []


def _listed(values: list[str]) -> str:
    more = len(values) - _MOST_VALUES
    return ", ".join(values[:_MOST_VALUES]) + (f", and {more} more" if more > 0 else "")


def _telemetry(view: View) -> list[Block]:
    """Least, median and greatest of each reading, over the whole sweep."""
    readings: dict[tuple[str, ...], list[float]] = {}
    for _, row in view.rows("telemetry", ("node", "source", "name", "value")):
        if row["value"] is not None:
            key = (row["node"] or "", row["source"] or "", row["name"] or "")
            readings.setdefault(key, []).append(row["value"])
    body = [
        (*key, len(values), *[f"{end:g}" for end in (min(values), median(values), max(values))])
        for key, values in readings.items()
    ]
    columns = ("node", "source", "reading", "samples", "least", "median", "greatest")
    return [text_table("Readings over the sweep", columns, body)] if body else []
