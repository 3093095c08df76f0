"""The shape of an experiment: every key of `conf/`, its type, its unit and its default.

Values live in `conf/`; this module only says what may stand there. Enumerations make
Hydra name the allowed values when a value is wrong. Nothing heavy is imported, so that
`--help` and `--cfg job` stay fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Measure(Enum):
    """What a sweep measures."""

    a2a = "a2a"
    serving = "serving"


class TransportKind(Enum):
    """What carries the expert traffic. `auto` leaves the choice to the library and records it."""

    auto = "auto"
    nvlink = "nvlink"
    shm = "shm"
    tcp = "tcp"
    ib = "ib"
    efa = "efa"


class DeviceKind(Enum):
    """Where ranks run. `auto` takes CUDA when the cluster has GPUs, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ArmKind(Enum):
    """How a model is laid out over GPUs and API servers."""

    wide_tp = "wide_tp"
    external_dp = "external_dp"
    internal_dp = "internal_dp"
    hybrid_dp = "hybrid_dp"
    attached = "attached"


class RoutingKind(Enum):
    """How the router of the all-to-all benchmark picks experts; `file` reads real choices."""

    uniform = "uniform"
    zipf = "zipf"
    balanced = "balanced"
    one_hot = "one_hot"
    file = "file"


class LaunchKind(Enum):
    """How operations are launched: call by call, or replayed from a captured CUDA graph."""

    eager = "eager"
    graph = "graph"


class CompatKind(Enum):
    """Whose benchmark's way of measuring is followed; docs/measuring.md says what differs."""

    pplx_garden = "pplx_garden"
    deepep = "deepep"
    nccl_tests = "nccl_tests"
    uccl = "uccl"


class Dtype(Enum):
    """Element type of the rows that travel. FP8 is e4m3 with one float32 scale per 128 columns."""

    fp8 = "fp8"
    bf16 = "bf16"


class RouterPolicy(Enum):
    """How requests reach the ranks. `none` means that there is no router: one server, direct."""

    round_robin = "round_robin"
    none = "none"


class Api(Enum):
    """Which OpenAI-compatible endpoint receives the load."""

    completions = "completions"
    chat = "chat"


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
class Transport:
    """What carries expert traffic, and how it is asked for.

    Attributes:
        kind: The transport that the arm asks for; a run proves or fails to prove it.
        interface: Network interface for sockets; null lets the library choose.
        nics_per_gpu: NICs that one GPU drives; null where it is not known.
        env: Further environment variables, only NCCL_, FI_, UCX_, GLOO_ or VLLM_.
    """

    kind: TransportKind = TransportKind.auto
    interface: str | None = None
    nics_per_gpu: int | None = None
    env: dict[str, str] = field(default_factory=dict)


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
class Model:
    """The model that engines serve.

    Attributes:
        name: Name under which it is served.
        path: Local folder or hub id; null makes the model `made` locally.
        revision: Pinned revision of a hub id.
        made: Shape made locally without weights: `tiny`, `lite` or `tiny_dense`; null for
            real models.
        load_format: vLLM's load format; `dummy` needs no weights.
        experts: Routed experts, to check EP; 0 for a dense model, null where it is not known.
        vocab_size: For token-id prompts; null asks the model's config.json.
        max_model_len: Longest prompt + completion, in tokens.
        dtype: vLLM's dtype.
    """

    name: str = MISSING
    path: str | None = None
    revision: str | None = None
    made: str | None = None
    load_format: str = "auto"
    experts: int | None = None
    vocab_size: int | None = None
    max_model_len: int = 8192
    dtype: str = "bfloat16"


@dataclass
class Arm:
    """One side of a serving comparison.

    Attributes:
        name: Label in tables; unique within an experiment.
        kind: Layout.
        tp: Tensor-parallel size of each engine.
        dp: Data-parallel ranks that share one expert collective.
        dp_local: `hybrid_dp` only: ranks behind each API server.
        enable_ep: Whether experts are spread over TP x DP (expert parallelism).
        ep: Declared EP size; must equal TP x DP with EP on. null takes that product.
        all2all_backend: vLLM's all-to-all backend for the experts.
        max_num_seqs: Most sequences that one engine runs at once.
        gpu_memory_utilization: Share of GPU memory that one engine takes.
        kv_cache_gib: Size of the KV cache per rank on the CPU build, GiB.
        enforce_eager: Whether CUDA graphs and compilation are off.
        vllm_port: `VLLM_PORT` of the group: where vLLM starts to probe for ports.
        api_port: Port of the first API server; rank r listens on `api_port + r`.
        rpc_port: Data-parallel RPC port of the group.
        extra_args: Further arguments for the vLLM server.
        env: Further environment variables of the engines.
        router: Router policy; null takes the experiment's `router`.
        transport: Transport of this arm; null takes the experiment's `transport`.
        startup_timeout_s: Deadline for all ranks to generate one token.
        url: `attached` only: base URL of the running server or router.
        rank_urls: `attached` only: base URLs of its ranks, for the ledger.
    """

    name: str = MISSING
    kind: ArmKind = MISSING
    tp: int = 1
    dp: int = 1
    dp_local: int | None = None
    enable_ep: bool = False
    ep: int | None = None
    all2all_backend: str = "allgather_reducescatter"
    max_num_seqs: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: int = 1
    enforce_eager: bool = False
    vllm_port: int = 19500
    api_port: int = 18000
    rpc_port: int = 19400
    extra_args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    router: RouterPolicy | None = None
    transport: Transport | None = None
    startup_timeout_s: float = 900.0
    url: str | None = None
    rank_urls: list[str] = field(default_factory=list)


@dataclass
class Router:
    """The router actor in front of a group of ranks.

    Attributes:
        policy: How an endpoint is chosen.
        host: Address that the router listens on.
        port: Port that the router listens on.
        connect_timeout_s: Deadline to open a connection to a rank.
    """

    policy: RouterPolicy = RouterPolicy.round_robin
    host: str = "127.0.0.1"
    port: int = 18900
    connect_timeout_s: float = 5.0


@dataclass
class Load:
    """What the load generator sends. Cells are shapes x concurrency.

    Attributes:
        api: Endpoint that receives the load.
        shapes: `prompt/completion` in tokens, for example `1024/256`.
        concurrency: Requests in flight; the loop is closed.
        min_requests: Fewest measured requests in a cell.
        requests_per_slot: Measured requests per unit of concurrency, where that is more.
        warmups: Warm-up requests per cell, excluded and kept with their role.
        calibration: Calibration requests per arm, excluded and kept with their role.
        ignore_eos: Whether every request generates exactly the asked completion length.
        temperature: Sampling temperature.
        request_timeout_s: Deadline of one request.
    """

    api: Api = Api.completions
    shapes: list[str] = MISSING
    concurrency: list[int] = MISSING
    min_requests: int = 32
    requests_per_slot: int = 4
    warmups: int = 4
    calibration: int = 1
    ignore_eos: bool = True
    temperature: float = 0.0
    request_timeout_s: float = 600.0


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
    seed: int = 0
    results: str = "runs"
    resume: str | None = None
    plan_only: bool = False
