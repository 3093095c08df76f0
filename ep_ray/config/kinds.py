"""Words that stand in a configuration where only some are allowed; Hydra names them."""

from __future__ import annotations

from enum import Enum


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
    """How a model is laid out over GPUs and API servers.

    `attached` is a server that runs already, whatever its layout; `null_engine` has `dp` engines
    without a model, which answer at a fixed pace: what is left is client and router.
    """

    wide_tp = "wide_tp"
    external_dp = "external_dp"
    internal_dp = "internal_dp"
    hybrid_dp = "hybrid_dp"
    attached = "attached"
    null_engine = "null_engine"


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
    """How requests reach the ranks.

    `round_robin` takes them in turn, exactly; `random` draws each; `least_inflight` takes the rank
    with the fewest requests on their way; `session` keeps each session at one rank; `vllm_router`
    is another router, the `vllm-router` package, which goes round too; `none` means that there is
    no router: the client goes to the server, or round the servers itself.
    """

    round_robin = "round_robin"
    random = "random"
    least_inflight = "least_inflight"
    session = "session"
    vllm_router = "vllm_router"
    none = "none"


class ArrivalKind(Enum):
    """When requests are sent: `closed` keeps so many in flight; the others are open loops.

    `poisson` draws independent gaps, `gamma` gaps of a given burstiness, and `ramp` is Poisson with
    a rate that rises linearly; `trace` stretches the gaps of a trace to the rate.
    """

    closed = "closed"
    poisson = "poisson"
    gamma = "gamma"
    ramp = "ramp"
    trace = "trace"


class PromptKind(Enum):
    """What prompts are made of.

    `token_ids` draws random ids of exact length, or words where a server takes no ids; `text`
    draws words; of `shared_prefix` the first tokens are the same in all requests of a cell;
    `conversations` sends the first questions of a file in the format of ShareGPT, and
    `trace` ids that share blocks as the requests of a file in the format of Mooncake do.
    """

    token_ids = "token_ids"
    text = "text"
    shared_prefix = "shared_prefix"
    conversations = "conversations"
    trace = "trace"


class Api(Enum):
    """Which OpenAI-compatible endpoint receives the load."""

    completions = "completions"
    chat = "chat"
