"""How a workload point is measured, the same on every rank, and what one rank brings back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ep_ray.a2a.stats import Samples
from ep_ray.config.schema import CompatKind, RoutingKind


@dataclass(frozen=True)
class Procedure:
    """How a workload point is measured.

    Attributes:
        iterations: Measured iterations per operation.
        seed: Seed of the routing.
        routing: How experts are chosen.
        zipf_exponent: Exponent of `zipf` routing.
        min_warmup: Fewest warm-up iterations.
        max_warmup: Most warm-up iterations.
        warmup_tolerance: Relative difference at which warm-up ends.
        check: Whether correctness is checked before timing.
        masked_share: Chance that a choice is masked.
        tokens_per_rank: `uniform`, `ragged`, or one number per rank.
        local_tp: Neighbouring ranks that share one batch, each with an equal part of it.
        split: Whether send and receive are timed apart, where the backend separates them.
        overlap_us: Length of the matmul between send and receive, or None for no such operation.
        compat: Whose way of measuring is followed; None is the project's own.
    """

    iterations: int
    seed: int = 0
    routing: RoutingKind = RoutingKind.uniform
    zipf_exponent: float = 1.2
    min_warmup: int = 20
    max_warmup: int = 500
    warmup_tolerance: float = 0.02
    check: bool = True
    masked_share: float = 0.0
    tokens_per_rank: str | tuple[int, ...] = "uniform"
    local_tp: int = 1
    split: bool = True
    overlap_us: float | None = None
    compat: CompatKind | None = None


@dataclass(frozen=True)
class TrialResult:
    """What one rank brings back.

    Attributes:
        rank: This rank.
        samples: This rank's timings; none if the check failed.
        operations: On rank 0 one dict per operation, keyed as the `operations` table after its
            key; nothing elsewhere.
        error: Why there are no timings, or None.
        timed_unix_ns: When its first sample began; 0 without timings.
        timed_ns: From there to the end of its last sample, with all that lies between samples.
    """

    rank: int
    samples: Samples
    operations: list[dict[str, Any]]
    error: str | None
    timed_unix_ns: int = 0
    timed_ns: int = 0
