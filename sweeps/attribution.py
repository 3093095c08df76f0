"""Where a difference comes from: what `isolate` measured, cell by cell. Pure.

A router's share is an arm behind it less the same engines without it, and the same of engines
without a model. The collective's share is its time alone, as often as the model does it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ep_ray.config.isolate import direct_name, null_name
from ep_ray.config.schema import Arm, ArmKind, RouterPolicy
from ep_ray.layout import endpoints
from serving.load.metrics import CellMetrics
from sweeps.isolate import decode_tokens, has_collective, prefill_tokens
from sweeps.results import Outcome, Trial
from sweeps.stats import Difference, paired_difference
from sweeps.view import ServingKey, View

ADDED = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
"""Metrics to which a router adds, in ms."""

_US_PER_MS = 1e3


@dataclass(frozen=True)
class RouterShare:
    """What a router added in a cell.

    Attributes:
        arm: Label of the arm behind it.
        added: By metric of `ADDED`: before the arm's own engines, in ms.
        added_to_null: Likewise before engines without a model.
    """

    cell: ServingKey
    arm: str
    policy: str
    added: Mapping[str, Difference | None]
    added_to_null: Mapping[str, Difference | None]


@dataclass(frozen=True)
class CollectiveShare:
    """What an arm's expert collective takes by itself, in a cell.

    Attributes:
        arm: Label of the arm.
        phase: `decode` or `prefill`.
        tokens: That each data-parallel rank sends.
        backend: Arm of the all-to-all benchmark.
        launch: How it was launched: `graph` where it was measured from CUDA graphs.
        pair_us: Dispatch and combine of one layer.
        layers: MoE layers of the model; None where they are not known.
        of_ms: What it is part of: TPOT p50 for decode, TTFT p50 for prefill; None if not measured.
    """

    cell: ServingKey
    arm: str
    phase: str
    tokens: int
    backend: str
    launch: str
    pair_us: float
    layers: int | None
    of_ms: float | None

    @property
    def step_ms(self) -> float | None:
        """All layers of one step."""
        return self.pair_us * self.layers / _US_PER_MS if self.layers else None

    @property
    def share(self) -> float | None:
        """Of TPOT or TTFT. Above 1 where the steps of the arm were not what was assumed."""
        return self.step_ms / self.of_ms if self.step_ms and self.of_ms else None


def router_shares(view: View) -> Iterator[RouterShare]:
    """What was added, in every cell of an arm behind a router whose twin was measured."""
    for cell, outcomes in view.serving.items():
        by_arm = {outcome.trials[0].arm: outcome for outcome in outcomes.values()}
        nulls = _null_arms(view, outcomes)
        for label, outcome in outcomes.items():
            trial = outcome.trials[0]
            arm = _arm(trial)
            if arm is None or trial.router in (None, "none") or arm.kind is ArmKind.null_engine:
                continue
            ranks, policy = endpoints(arm), trial.router
            direct = by_arm.get(direct_name(trial.arm))
            null = nulls.get(null_name(ranks, policy))
            null_direct = nulls.get(null_name(ranks, RouterPolicy.none.name))
            added, to_null = _added(outcome, direct), _added(null, null_direct)
            if any(added.values()) or any(to_null.values()):
                yield RouterShare(cell, label, policy, added, to_null)


def _null_arms(
    view: View, beside: Mapping[str, Outcome[CellMetrics]]
) -> dict[str, Outcome[CellMetrics]]:
    """Null engines' outcomes at the same load, by arm."""
    load = {(t.cell, t.arrival) for outcome in beside.values() for t in outcome.trials}
    found = [o for outcomes in view.serving.values() for o in outcomes.values()]
    firsts = [(outcome.trials[0], outcome) for outcome in found]
    return {
        trial.arm: outcome
        for trial, outcome in firsts
        if trial.arm_kind == "null_engine" and (trial.cell, trial.arrival) in load
    }


def _added(
    routed: Outcome[CellMetrics] | None, direct: Outcome[CellMetrics] | None
) -> dict[str, Difference | None]:
    if routed is None or direct is None:
        return dict.fromkeys(ADDED)
    return {
        metric: paired_difference(routed.series(metric), direct.series(metric)) for metric in ADDED
    }


def collective_shares(view: View) -> Iterator[CollectiveShare]:
    """The collective alone beside every cell of an arm whose experts exchange tokens."""
    alone = _measured_alone(view)
    for cell, outcomes in view.serving.items():
        for label, outcome in outcomes.items():
            trial = outcome.trials[0]
            arm = _arm(trial)
            if arm is None or not has_collective(arm) or trial.arm.endswith(direct_name("")):
                continue
            for phase, tokens in _steps(arm, trial):
                found = alone.get((f"{phase}_{tokens}", arm.tp * arm.dp, trial.transport_asked))
                if found is not None:
                    metric = "tpot_p50_ms" if phase == "decode" else "ttft_p50_ms"
                    layers = next((t.moe_layers for t in outcome.trials if t.moe_layers), None)
                    yield CollectiveShare(
                        cell, label, phase, tokens, *found, layers, outcome.median(metric)
                    )


def _steps(arm: Arm, trial: Trial) -> Iterator[tuple[str, int]]:
    if trial.concurrency:
        yield "decode", decode_tokens(arm, trial.concurrency)
    prompt = (trial.shape or "").partition("/")[0]
    if prompt.isdigit():
        yield "prefill", prefill_tokens(arm, int(prompt))


def _measured_alone(view: View) -> dict[tuple[str, int, str | None], tuple[str, str, float]]:
    """Backend, launch and pair in µs, by phase, ranks and transport; graphs before eager."""
    found: dict[tuple[str, int, str | None], tuple[str, str, float]] = {}
    for outcomes in view.a2a.values():
        for outcome in outcomes.values():
            trial, pair_us = outcome.trials[0], outcome.median("pair_us")
            key = (trial.phase or "", trial.ep or 0, trial.transport_asked)
            if pair_us is not None and (key not in found or trial.launch == "graph"):
                found[key] = (trial.arm, trial.launch or "eager", pair_us)
    return found


def _arm(trial: Trial) -> Arm | None:
    """The arm as it was asked for; None where the configuration was not recorded."""
    asked = json.loads(trial.config_json or "{}").get("arm", {}).get("arm")
    if asked is None:
        return None
    keys = ("name", "tp", "dp", "dp_local", "enable_ep", "max_num_seqs", "rank_urls")
    known = {key: asked[key] for key in keys if key in asked}
    return Arm(**known, kind=ArmKind[asked["kind"]])
