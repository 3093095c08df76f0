"""The shape of a serving experiment: model, arms, their transport, router and load."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from ep_ray.config.kinds import (
    Api,
    ArmKind,
    ArrivalKind,
    PromptKind,
    RouterPolicy,
    TransportKind,
)


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
        router: Router policy; null takes the experiment's `router`. An `attached` arm with one
            gets a router in front of its `rank_urls`, or of its `url` where none are given.
        transport: Transport of this arm; null takes the experiment's `transport`.
        startup_timeout_s: Deadline for all ranks to generate one token, of each start: a group
            that lost a race for a port is started once more.
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
    """The router in front of a group of ranks.

    Attributes:
        policy: How an endpoint is chosen.
        host: Address that the router listens on.
        port: Port that the router listens on; `vllm_router` listens on the next one, and its
            metrics on the one after that.
        connect_timeout_s: Deadline to open a connection to a rank.
        cooldown_s: How long a rank that failed keeps requests away before it is tried again.
        processes: Processes of ep-ray's own router, which share its port: for where one core is
            not enough. Each takes turns for itself, so that only one process is exact.
        executable: Program of `vllm_router`, a path or a name; null takes the one beside this
            Python, else the one on PATH.
    """

    policy: RouterPolicy = RouterPolicy.round_robin
    host: str = "127.0.0.1"
    port: int = 18900
    connect_timeout_s: float = 5.0
    cooldown_s: float = 5.0
    processes: int = 1
    executable: str | None = None


@dataclass
class Load:
    """What the load generator sends. Cells are shapes x concurrency, or shapes x rate.

    Attributes:
        api: Endpoint that receives the load.
        shapes: `prompt/completion` in tokens, for example `1024/256`. Where prompts are from a
            file, `file/256`, or `file/file` for completions as long as the file's replies.
        prompts: What prompts are made of; each has a part that no other request shares.
        shared_prefix_tokens: Length of the prefix of `shared_prefix`, in tokens; words in text.
        file: What `conversations` or a `trace` are read from, where the sweep is started.
        concurrency: Requests in flight in a closed loop; open loops do not read it.
        arrival: When requests are sent.
        rate: Requests per second of open loops, whatever the server does; of a ramp, at its end.
        duration_s: How long requests arrive in a cell of an open loop; its measured requests are
            rate x duration_s, and not fewer than min_requests.
        burstiness: Shape of the gaps of `gamma`: below 1 in bursts, 1 is Poisson, above more even.
        ramp_from: Share of the rate at which a `ramp` begins.
        min_requests: Fewest measured requests in a cell.
        requests_per_slot: Measured requests per unit of concurrency, where that is more.
        warmups: Warm-up requests per cell, excluded and kept with their role.
        calibration: Calibration requests per arm, excluded and kept with their role.
        ignore_eos: Whether every request generates exactly the asked completion length.
        temperature: Sampling temperature.
        request_timeout_s: Deadline of one request.
        sessions: Sessions that the requests of a cell belong to in turn (`x-session-id`), which
            the router policy `session` keeps at one rank each; 0 for none.
        cancel_share: Share of the measured requests that the client cancels, 0 to 1: the same
            ones in every arm. They are no failures and count in no figure.
        cancel_after_tokens: Tokens after which it closes their connections.
        clients: Processes that send the load, where one cannot keep up. They share out a cell's
            requests and concurrency, and begin its measured requests together.
    """

    api: Api = Api.completions
    shapes: list[str] = MISSING
    prompts: PromptKind = PromptKind.token_ids
    shared_prefix_tokens: int = 0
    file: str | None = None
    concurrency: list[int] = MISSING
    arrival: ArrivalKind = ArrivalKind.closed
    rate: list[float] = field(default_factory=list)
    duration_s: float = 30.0
    burstiness: float = 1.0
    ramp_from: float = 0.1
    min_requests: int = 32
    requests_per_slot: int = 4
    warmups: int = 4
    calibration: int = 1
    ignore_eos: bool = True
    temperature: float = 0.0
    request_timeout_s: float = 600.0
    sessions: int = 0
    cancel_share: float = 0.0
    cancel_after_tokens: int = 8
    clients: int = 1
