"""The shape of an experiment: every key of `conf/`, its type, its unit and its default.

Values live in `conf/`; this module only says what may stand there. Enumerations make
Hydra name the allowed values when a value is wrong. Nothing heavy is imported, so that
`--help` and `--cfg job` stay fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ep_ray.config.kinds import (
    Api,
    ArmKind,
    ArrivalKind,
    CompatKind,
    DeviceKind,
    Dtype,
    LaunchKind,
    Measure,
    PromptKind,
    RouterPolicy,
    RoutingKind,
    TransportKind,
)
from ep_ray.config.serving import Arm, Load, Model, Router, Transport

__all__ = [
    "Against",
    "Api",
    "Arm",
    "ArmKind",
    "ArrivalKind",
    "Backend",
    "Cluster",
    "CompatKind",
    "Config",
    "Deadlines",
    "DeviceKind",
    "Dtype",
    "LaunchKind",
    "Load",
    "Measure",
    "Model",
    "Phase",
    "PromptKind",
    "Router",
    "RouterPolicy",
    "RoutingKind",
    "Transport",
    "TransportKind",
    "Workload",
]


@dataclass
class Cluster:
    """Where trials run.

    Attributes:
        name: Label written into every row.
        address: null starts a local Ray cluster; `auto` or `host:port` attaches to one.
        device: Device of ranks and engines.
        gpus: GPUs that a local cluster offers; null asks the machine.
        cpus: CPUs that a local cluster offers; null asks the machine.
        mask_gpus: Whether Ray hides other GPUs from communicator actors. Masking can corrupt
            a collective benchmark (ray#61073, nccl#1906), so it is off by default.
        ranks_per_gpu: Ranks that share one GPU. More than 1 proves function, not speed: such
            rows are marked and compared with no other.
        placement_timeout_s: How long to wait for the placement group.
        dashboard: Whether a local cluster starts the Ray dashboard.
    """

    name: str = MISSING
    address: str | None = None
    device: DeviceKind = DeviceKind.auto
    gpus: int | None = None
    cpus: int | None = None
    mask_gpus: bool = False
    ranks_per_gpu: int = 1
    placement_timeout_s: float = 60.0
    dashboard: bool = True


@dataclass
class Backend:
    """An all-to-all library.

    Attributes:
        name: `auto` takes `gloo` on the CPU and `nccl` on CUDA.
        options: Settings that only this library knows; checked by its adapter. `variant` is part
            of the arm's name.
    """

    name: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Phase:
    """One workload point of the all-to-all benchmark.

    Attributes:
        tokens: Tokens that each rank sends.
        iterations: Measured iterations.
    """

    tokens: int = MISSING
    iterations: int = MISSING


@dataclass
class Workload:
    """What the all-to-all benchmark sends. Cells are phases x ep x routing x launch.

    Attributes:
        hidden: Columns per token row.
        experts: Experts in the model, divided evenly over ranks.
        topk: Experts per token.
        ep: Numbers of ranks to measure.
        phases: Named points (`decode`, `prefill`).
        routing: How experts are chosen.
        zipf_exponent: Exponent of `zipf` routing.
        routing_file: Real choices for `file` routing: .npy or .parquet, integers [N, topk].
        masked_share: Chance that a choice is masked (expert -1, weight 0).
        tokens_per_rank: `uniform`: each rank sends the phase's tokens; `ragged`: 0 to that many,
            drawn anew for each rank and routing; or a list with one number per rank.
        local_tp: Neighbouring ranks that share the phase's tokens, as tensor parallelism inside
            a group does (pplx-garden's `dp_size`): each sends its share of them, once.
        launch: How operations are launched.
        compat: Measures as another project's benchmark does; null is the project's own way.
        split: Whether send and receive are timed apart, where the backend separates them.
        overlap_us: Length of the matmul between send and receive in `pair_overlapped`, in
            microseconds; null leaves that operation out.
        dispatch_dtype: Type of dispatched rows.
        combine_dtype: Type of combined rows.
        min_warmup: Fewest warm-up iterations.
        max_warmup: Most warm-up iterations.
        warmup_tolerance: Warm-up ends when two windows of 20 differ by less than this share.
        check: Whether correctness is checked before timing. Off gives rows marked unchecked.
    """

    hidden: int = MISSING
    experts: int = MISSING
    topk: int = MISSING
    ep: list[int] = MISSING
    phases: dict[str, Phase] = MISSING
    routing: list[RoutingKind] = field(default_factory=lambda: [RoutingKind.uniform])
    zipf_exponent: float = 1.2
    routing_file: str | None = None
    masked_share: float = 0.0
    tokens_per_rank: Any = "uniform"
    local_tp: int = 1
    launch: list[LaunchKind] = field(default_factory=lambda: [LaunchKind.eager])
    compat: CompatKind | None = None
    split: bool = True
    overlap_us: float | None = None
    dispatch_dtype: Dtype = Dtype.fp8
    combine_dtype: Dtype = Dtype.bf16
    min_warmup: int = 20
    max_warmup: int = 500
    warmup_tolerance: float = 0.02
    check: bool = True


@dataclass
class Against:
    """What the experiment's `arm` or `backend` is compared with, by name.

    Attributes:
        arms: Further sides of the serving comparison.
        backends: Further all-to-all libraries.
        skip_unavailable: Whether a backend that cannot run here is recorded with its reasons and
            skipped. If not, the experiment does not start.
    """

    arms: dict[str, Arm] = field(default_factory=dict)
    backends: dict[str, Backend] = field(default_factory=dict)
    skip_unavailable: bool = False


@dataclass
class Deadlines:
    """How long remote steps may take, in seconds.

    Attributes:
        actor_start_s: Start of all actors of a trial.
        communicator_s: Rendezvous and creation of a communicator.
        trial_s: One all-to-all trial or one serving cell.
        teardown_s: Orderly end of actors, before they are killed.
    """

    actor_start_s: float = 120.0
    communicator_s: float = 120.0
    trial_s: float = 1800.0
    teardown_s: float = 30.0


@dataclass
class Config:
    """An experiment. `python -m ep_ray.sweep --help` explains how to choose and change one.

    Attributes:
        name: Name of the experiment; part of the results folder's name.
        measure: What is measured, in order.
        repeats: How often every cell is run.
        isolate: Also runs what tells a difference's cause: each arm behind a router without it,
            null engines behind it and without, and the arms' expert collective alone.
        seed: Seed of routing and prompts.
        results: Folder that receives one folder per sweep.
        resume: Results folder of an earlier sweep: runs what is missing or failed there.
        plan_only: Prints the trials with estimates and starts nothing.
    """

    name: str = MISSING
    measure: list[Measure] = MISSING
    cluster: Cluster = field(default_factory=Cluster)
    transport: Transport = field(default_factory=Transport)
    backend: Backend = field(default_factory=Backend)
    workload: Workload = field(default_factory=Workload)
    model: Model = field(default_factory=Model)
    arm: Arm = field(default_factory=Arm)
    router: Router = field(default_factory=Router)
    load: Load = field(default_factory=Load)
    against: Against = field(default_factory=Against)
    deadlines: Deadlines = field(default_factory=Deadlines)
    repeats: int = 1
    isolate: bool = False
    seed: int = 0
    results: str = "runs"
    resume: str | None = None
    plan_only: bool = False
