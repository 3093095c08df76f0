"""What a trial leaves behind: a status, and rows for the tables."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ep_ray.transport import Evidence
from sweeps.trial import A2aTrial, ServingTrial, Trial

UNAVAILABLE = "unavailable"
"""Status of a trial whose backend this hardware or software cannot run: nothing was tried."""


@dataclass
class Outcome:
    """Result of one attempt of a trial.

    Attributes:
        status: `ok`, `failed`, `timeout`, `crash` or `unavailable`.
        error: Why it is not ok.
        facts: Further columns of the `trials` table.
        rows: Rows of the other tables, by table: lists of dicts, or Arrow tables.
        headline: Figures for the dashboard, by name with unit.
    """

    status: str = "ok"
    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    headline: dict[str, float] = field(default_factory=dict)


def trial_row(trial: Trial, experiment: str, outcome: Outcome, started_ns: int) -> dict[str, Any]:
    """Columns of the `trials` table, but for those that the store adds."""
    return {
        "trial_id": trial.trial_id,
        "experiment": experiment,
        "measure": trial.measure,
        "arm": trial.arm,
        "cell": trial.cell,
        "repeat": trial.repeat,
        "status": outcome.status,
        "error": outcome.error,
        "config_hash": trial.config_hash,
        "config_json": trial.config_json,
        "started_unix_ns": started_ns,
        "duration_ns": time.time_ns() - started_ns,
        "transport_asked": _asked(trial),
        **_cell_columns(trial),
        **outcome.facts,
    }


def status_rows(
    document: Mapping[str, Any], probes: Mapping[str, int | str]
) -> list[dict[str, Any]]:
    """Rows of the `status` table, one per rank.

    Args:
        document: The router's status document; empty without a router.
        probes: Nanoseconds to a token of each rank, or why none came, by name.
    """
    known = {endpoint["name"]: endpoint for endpoint in document.get("endpoints", ())}
    group = {
        "load_balance": document.get("policy"),
        "desired": document.get("desired_endpoints"),
        "ready": document.get("ready_endpoints"),
        "parallelism": json.dumps(document["parallelism"]) if document else None,
    }
    keys = ("registered", "healthy", "in_selection", "circuit")
    return [
        {
            "endpoint": name,
            **group,
            **{key: known.get(name, {}).get(key) for key in keys},
            "probe_ns": found if isinstance(found, int) else None,
            "probe_error": found if isinstance(found, str) else None,
        }
        for name, found in probes.items()
    ]


def released_rows(
    held: Sequence[tuple[str, Sequence[tuple[str, float, int]]]], left: str
) -> list[dict[str, Any]]:
    """Rows of the `released` table: one per GPU, or one for a machine without GPUs.

    Args:
        held: Each machine's name, and (GPU, MiB in use, processes) of its GPUs.
        left: What the arm left behind, in words.
    """
    rows: list[dict[str, Any]] = []
    for node, gpus in held:
        row = {"node": node, "left_behind": left}
        rows += [row | {"gpu": g, "memory_used_mib": m, "processes": n} for g, m, n in gpus]
        rows += [] if gpus else [row]
    return rows


def _asked(trial: Trial) -> str:
    assert isinstance(trial, A2aTrial | ServingTrial)
    return trial.transport.kind.name


def _cell_columns(trial: Trial) -> dict[str, Any]:
    if isinstance(trial, A2aTrial):
        work = json.loads(trial.config_json)["arm"]["workload"]
        return {
            "backend": trial.backend.name,
            "phase": trial.phase,
            "ep": trial.ep,
            "tokens": trial.tokens,
            "routing": trial.routing.name,
            **{k: work[k] for k in ("hidden", "experts", "topk")},
            **{k: work[k] for k in ("dispatch_dtype", "combine_dtype", "compat", "masked_share")},
            "tokens_per_rank": str(work["tokens_per_rank"]),
            "local_tp": work["local_tp"],
            "launch": trial.launch.name,
        }
    assert isinstance(trial, ServingTrial)
    layout, load = trial.layout, json.loads(trial.config_json)["arm"]["load"]
    return {
        "backend": layout.all2all_backend if layout.enable_ep else None,
        "arm_kind": layout.kind.name,
        "shape": trial.shape,
        "concurrency": trial.concurrency or None,
        "arrival": trial.arrival.name,
        "rate_per_s": trial.rate_per_s,
        "requests": trial.requests,
        "router": trial.router.name,
        "router_processes": trial.router_processes,
        # As asked; a cell that ran says what was sent.
        "prompts": load["prompts"],
        "cancel_share": load["cancel_share"] or None,
        "cancel_after_tokens": load["cancel_after_tokens"] if load["cancel_share"] else None,
        "clients": load["clients"],
        **({"tp": layout.tp, "dp": layout.dp} if trial.gpus else {}),
        **({"ep": layout.tp * layout.dp} if layout.enable_ep else {}),
    }


def evidence_rows(evidence: Sequence[Evidence]) -> list[dict[str, Any]]:
    """Rows of the `transport` table."""
    return [
        {
            "rank": e.rank,
            "source": e.source,
            "evidence": e.evidence,
            "transport": e.transport,
            "bytes_seen": e.bytes_seen,
            "bytes_expected": e.bytes_expected,
        }
        for e in evidence
    ]


def what_ran(
    versions: Mapping[str, str], hardware: Any, env: Mapping[str, Mapping[str, str]], device: str
) -> dict[str, Any]:
    """The columns of `trials` that say what a number was measured on."""
    return {
        "versions_json": json.dumps(versions, sort_keys=True),
        "hardware_json": json.dumps(hardware, sort_keys=True),
        "env_json": json.dumps(env, sort_keys=True),
        "device": device,
    }
