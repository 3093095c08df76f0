"""From an arm's configuration to the command line and environment of each engine. Pure.

Only flags that exist in vLLM 0.24 as well as in 0.30 are used. Every rank is a real
`vllm.entrypoints.openai.api_server`; an `external_dp` arm has one per data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ep_ray.config.schema import ArmKind
from ep_ray.layout import gpus_per_server, ranks_per_server, servers
from serving.models import ResolvedModel
from serving.ports import Claim, probe_base, rank_claims

SERVER = ("-m", "vllm.entrypoints.openai.api_server")
KEEP_ALIVE_S = 120  # must exceed the idle time of client and router, or reused connections reset
_OWNED_ENV = {
    "VLLM_PORT": "arm.vllm_port",
    "VLLM_HOST_IP": "the cluster's placement",
    "VLLM_CPU_KVCACHE_SPACE": "arm.kv_cache_gib",
    "CUDA_VISIBLE_DEVICES": "the cluster's placement",
}


@dataclass(frozen=True)
class Seat:
    """Where one rank runs.

    Attributes:
        node_ip: Address of the node; the API server listens there.
        gpus: The node's GPUs that the engine may see, as CUDA_VISIBLE_DEVICES names them;
            empty on the CPU.
        options: Options of the rank's Ray actor (resources, scheduling strategy).
    """

    node_ip: str
    gpus: tuple[int | str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """Everything that a node needs to start one rank.

    Attributes:
        name: The actor's name, for example `engine:external_dp:rank1`.
        rank: Data-parallel rank.
        argv: Arguments after the Python interpreter.
        env: Variables added to the node's environment.
        node_ip: Address that the server listens on.
        port: Port that the server listens on.
        model: What it serves.
        claims: Ports that must be free before it starts.
    """

    name: str
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    node_ip: str
    port: int
    model: ResolvedModel
    claims: tuple[Claim, ...]

    @property
    def url(self) -> str:
        return f"http://{self.node_ip}:{self.port}"


def plan_launches(
    arm: Any,
    model: ResolvedModel,
    load_format: str,
    dtype: str,
    seats: Sequence[Seat],
    transport_env: Sequence[Mapping[str, str]],
    cpus: Sequence[int] | None,
) -> list[Launch]:
    """One Launch per API server: `arm.dp` of them for `external_dp`, one for `wide_tp`.

    A dense model has no expert collective: its External DP ranks are plain replicas.

    Args:
        arm: `ep_ray.config.schema.Arm`, or a node of the same shape.
        model: From `serving.models.resolve`.
        load_format: `model.load_format`.
        dtype: `model.dtype`.
        seats: One per server, in rank order.
        transport_env: What the transport asks for, per rank: it may differ, as NCCL_HOSTID does.
        cpus: Ids of the cores that the engines share; None when they run on GPUs.

    Raises:
        ValueError: The arm cannot be launched like this; says which setting to change.
    """
    check_launchable(arm, seats, transport_env, on_gpu=cpus is None)
    node_ips = [seat.node_ip for seat in seats]
    common = _model_argv(model, load_format, dtype) + _engine_argv(arm, on_gpu=cpus is None)
    launches = []
    for rank, seat in enumerate(seats):
        argv = [*SERVER, *common, "--host", seat.node_ip, "--port", str(arm.api_port + rank)]
        argv += _data_parallel_argv(arm, model, rank, node_ips[0])
        _check_extra(arm, argv)
        env = _base_env(seat, probe_base(arm.vllm_port, node_ips, rank))
        env |= _cpu_env(arm, cpus, len(seats), rank) if cpus is not None else {}
        launches.append(
            Launch(
                name=f"engine:{arm.name}:rank{rank}",
                rank=rank,
                argv=(*argv, *arm.extra_args),
                env=env | dict(transport_env[rank]) | dict(arm.env),
                node_ip=seat.node_ip,
                port=arm.api_port + rank,
                model=model,
                claims=tuple(rank_claims(arm, node_ips, rank)),
            )
        )
    return launches


def check_launchable(
    arm: Any, seats: Sequence[Seat], transport_env: Sequence[Mapping[str, str]], on_gpu: bool
) -> None:
    """Raises ValueError where seats, environment and arm do not fit together."""
    ranks = servers(arm)
    if not ranks:
        raise ValueError(f"arm {arm.name} is attached: its servers run already")
    if not ranks == len(seats) == len(transport_env):
        raise ValueError(f"arm {arm.name} has {ranks} servers, but {len(seats)} seats and "
                         f"{len(transport_env)} transport environments were given")  # fmt: skip
    for rank, seat in enumerate(seats):
        if on_gpu and len(seat.gpus) != gpus_per_server(arm):
            raise ValueError(f"rank {rank} of arm {arm.name} has GPUs {list(seat.gpus)}, "
                             f"but its layout needs {gpus_per_server(arm)}")  # fmt: skip
    nodes = {seat.node_ip for seat in seats}
    if len(nodes) > 1 and any(ip.startswith("127.") for ip in nodes):
        raise ValueError(f"ranks on {sorted(nodes)}: a group over several nodes cannot use "
                         "loopback; set VLLM_HOST_IP's source, the nodes' addresses")  # fmt: skip
    owned = sorted(set(_OWNED_ENV) & (set(arm.env) | {k for env in transport_env for k in env}))
    if owned:
        raise ValueError(f"arm {arm.name} sets {owned[0]}, which comes from "
                         f"{_OWNED_ENV[owned[0]]}: change that instead")  # fmt: skip


def cpu_binding(cpus: Sequence[int], tp: int, ranks: int, rank: int) -> tuple[str, int]:
    """Cores of one engine on the CPU build.

    Returns:
        `VLLM_CPU_OMP_THREADS_BIND` (one list per TP worker, or `nobind` where a rank has one
        core or less: pinned, its threads would starve each other) and `OMP_NUM_THREADS`.
    """
    per_worker = len(cpus) // (tp * ranks)
    if per_worker < 1 or (tp == 1 and per_worker == 1):
        return "nobind", 1
    first = rank * tp * per_worker
    starts = range(first, first + tp * per_worker, per_worker)
    groups = [",".join(map(str, cpus[start : start + per_worker])) for start in starts]
    return "|".join(groups), per_worker


def _model_argv(model: ResolvedModel, load_format: str, dtype: str) -> list[str]:
    return ["--model", model.path, "--served-model-name", model.name, "--dtype", dtype,
            "--load-format", load_format, "--max-model-len", str(model.max_model_len)]  # fmt: skip


def _engine_argv(arm: Any, on_gpu: bool) -> list[str]:
    argv = ["--tensor-parallel-size", str(arm.tp), "--max-num-seqs", str(arm.max_num_seqs)]
    if on_gpu:  # on the CPU it would be a share of the host's memory; kv_cache_gib says it there
        argv += ["--gpu-memory-utilization", str(arm.gpu_memory_utilization)]
    if arm.enable_ep:
        argv += ["--enable-expert-parallel"]
    if arm.enforce_eager:
        argv += ["--enforce-eager"]
    return [*argv, "--disable-uvicorn-access-log"]


def _data_parallel_argv(arm: Any, model: ResolvedModel, rank: int, rank0_ip: str) -> list[str]:
    local = ranks_per_server(arm)
    if arm.dp == 1 or (local == 1 and not model.experts):
        return []
    argv = ["--data-parallel-size", str(arm.dp), "--data-parallel-address", rank0_ip,
            "--data-parallel-rpc-port", str(arm.rpc_port)]  # fmt: skip
    if arm.kind is ArmKind.hybrid_dp:
        argv += ["--data-parallel-hybrid-lb", "--data-parallel-size-local", str(local),
                 "--data-parallel-start-rank", str(rank * local)]  # fmt: skip
    elif local == 1:
        argv += ["--data-parallel-rank", str(rank)]
    return [*argv, "--all2all-backend", arm.all2all_backend] if model.experts else argv


def _base_env(seat: Seat, vllm_port: int) -> dict[str, str]:
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, seat.gpus)),
        "VLLM_PORT": str(vllm_port),
        "VLLM_HOST_IP": seat.node_ip,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "HF_HUB_OFFLINE": "1",  # the model is resolved to a folder before
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",  # the log must be whole when a process dies
    }


def _cpu_env(arm: Any, cpus: Sequence[int], ranks: int, rank: int) -> dict[str, str]:
    local = ranks_per_server(arm)  # vLLM hands one list per TP worker, not per rank, to a server
    bind, threads = cpu_binding(cpus, arm.tp, ranks, rank) if local == 1 else ("nobind", 1)
    return {"VLLM_CPU_KVCACHE_SPACE": str(arm.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": bind, "OMP_NUM_THREADS": str(threads)}  # fmt: skip


def _check_extra(arm: Any, argv: Sequence[str]) -> None:
    ours = {word for word in argv if word.startswith("--")}
    twice = sorted({word.partition("=")[0].replace("_", "-") for word in arm.extra_args} & ours)
    if twice:
        raise ValueError(f"arm.extra_args repeats {', '.join(twice)}, which the arm's own settings "
                         "already give: change those, or the rows would not tell")  # fmt: skip
