"""A rough time for a plan, from published rates where a cell was published; no promise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby

from ep_ray.config.schema import ArmKind, DeviceKind, TransportKind
from serving.null_server import AS_A_MODEL
from sweeps.published.data import external_dp
from sweeps.trial import A2aTrial, ServingTrial, Trial

# Seconds, from runs of this project: Ray and actors, a vLLM start, one all-to-all iteration.
RAY_START_S = 15.0
ENGINE_START_S = {DeviceKind.cpu: 75.0, DeviceKind.cuda: 150.0}
ITERATION_S = {DeviceKind.cpu: 0.004, DeviceKind.cuda: 0.002}
_OPERATIONS, _WARMUP = 3, 100
# Output tokens per second where nothing was published: c / (time per token).
_COMPLETION = 256  # tokens, where a file says how many
_TOKEN_S = {DeviceKind.cpu: 0.03, DeviceKind.cuda: 0.02}


def estimate_s(trials: Sequence[Trial], device: DeviceKind) -> float:
    """Seconds that the trials take together, starts included."""
    blocks = (list(block) for _, block in groupby(trials, key=lambda trial: trial.block))
    return sum((block_s(block, device) for block in blocks), RAY_START_S if trials else 0.0)


def block_s(trials: Sequence[Trial], device: DeviceKind) -> float:
    """Seconds of one block; engines start once in it."""
    starts = any(isinstance(trial, ServingTrial) and trial.gpus for trial in trials)
    return (ENGINE_START_S[device] if starts else 0.0) + sum(_trial_s(t, device) for t in trials)


def _trial_s(trial: Trial, device: DeviceKind) -> float:
    if isinstance(trial, A2aTrial):
        scale = max(1.0, trial.ep * trial.tokens / 512)
        return _OPERATIONS * (trial.iterations + _WARMUP) * ITERATION_S[device] * scale
    assert isinstance(trial, ServingTrial)
    if trial.rate_per_s is not None:
        return trial.requests / trial.rate_per_s
    if trial.layout.kind is ArmKind.null_engine:
        steps = (trial.completion_tokens or _COMPLETION) - 1
        stream_s = (AS_A_MODEL.ttft_ns + steps * AS_A_MODEL.itl_ns) / 1e9
        return trial.requests * stream_s / trial.concurrency
    rate = _published_rate(trial)
    if rate is None:
        rate = min(trial.concurrency, 16) / _TOKEN_S[device]
    return trial.requests * (trial.completion_tokens or _COMPLETION) / rate


def _published_rate(trial: ServingTrial) -> float | None:
    if trial.layout.kind is ArmKind.wide_tp:
        arm = "wide_tp"
    elif trial.transport.kind in (TransportKind.ib, TransportKind.efa):
        arm = "external_dp_rdma"
    else:
        arm = "external_dp_tcp"
    return _rates().get((arm, trial.shape, trial.concurrency))


@cache
def _rates() -> dict[tuple[str, str, int], float]:
    return {
        (row.arm, row.shape, row.concurrency): float(row.output_tok_per_s)
        for row in external_dp()
        if row.output_tok_per_s
    }
