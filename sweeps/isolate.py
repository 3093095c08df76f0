"""What `isolate` measures beside the serving arms: their expert collective alone.

One all-to-all experiment for each collective of the arms: their number of ranks, transport and
model, with as many tokens per rank as a step of the arm has at each concurrency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ep_ray.config.check import arms_of, transport_of
from ep_ray.config.check_load import lengths_of
from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import (
    Against,
    Arm,
    ArrivalKind,
    Backend,
    Config,
    DeviceKind,
    Dtype,
    LaunchKind,
    Measure,
    Phase,
    RoutingKind,
    Transport,
    Workload,
)
from ep_ray.layout import has_engines
from serving.expert_bytes import model_config
from serving.models import ModelError, resolve

_ITERATIONS = {"decode": 200, "prefill": 50}
# vLLM's all2all_backend, and what does the same here; the others have no adapter.
_BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    # An all-gather of rows and a reduce-scatter of results: every rank has every token.
    "allgather_reducescatter": ("auto", {"variant": "equal"}),
    "deepep_high_throughput": ("deepep", {"variant": "normal"}),
    "deepep_low_latency": ("deepep", {"variant": "low_latency"}),
    "flashinfer_all2allv": ("flashinfer", {}),
    "flashinfer_nvlink_two_sided": ("flashinfer", {}),
    "nixl_ep": ("nixl_ep", {}),
}


@dataclass(frozen=True)
class _Collective:
    """What arms with the same expert collective share; TP ranks hold the same tokens."""

    ranks: int
    tp: int
    name: str  # vLLM's all2all_backend
    eager: bool
    transport: Transport


def parts(config: Config, device: DeviceKind, models: Path) -> list[Config]:
    """The experiment itself, and with `isolate` one more for each expert collective of its arms.

    Args:
        config: A checked experiment.
        device: `cpu` or `cuda`: on CUDA decode steps are replayed from graphs, as vLLM does.
        models: Where made models lie.

    Raises:
        ConfigError: The model, whose shape the collective has, is not here.
    """
    if not config.isolate:
        return [config]
    alone = _collectives(config)
    if not alone:
        return [config]
    try:
        model = resolve(config.model, models)
    except ModelError as error:
        raise ConfigError(f"isolate=true takes the collective's shape from it: {error}") from error
    shape = model_config(Path(model.path)) | {"experts": model.experts}
    return [config, *(_alone(config, one, phases, shape, device) for one, phases in alone)]


def decode_tokens(arm: Arm, concurrency: int) -> int:
    """Tokens that each data-parallel rank of an arm sends in a full decode step; one per sequence.

    Rounded up to whole sequences per rank, and to what its TP ranks share evenly.
    """
    running = min(concurrency, arm.dp * arm.max_num_seqs)
    per_rank = -(-running // arm.dp)
    return -(-per_rank // arm.tp) * arm.tp


def prefill_tokens(arm: Arm, prompt_tokens: int) -> int:
    """Tokens that each data-parallel rank sends for one whole prompt, rounded up likewise."""
    return -(-prompt_tokens // arm.tp) * arm.tp


def has_collective(arm: Arm) -> bool:
    """Whether an arm's experts exchange tokens.

    Without data-parallel ranks every rank has all tokens, and only results are summed.
    """
    return has_engines(arm) and arm.enable_ep and arm.dp > 1


def _collectives(config: Config) -> list[tuple[_Collective, dict[str, Phase]]]:
    """Each different collective with the phases of all arms that have it."""
    found: list[tuple[_Collective, dict[str, Phase]]] = []
    for arm in arms_of(config):
        if not has_collective(arm) or arm.all2all_backend not in _BACKENDS:
            continue
        name, eager, transport = arm.all2all_backend, arm.enforce_eager, transport_of(config, arm)
        one = _Collective(arm.tp * arm.dp, arm.tp, name, eager, transport)
        phases = dict(_phases(config, arm))
        same = next((known for other, known in found if other == one), None)
        if same is not None:
            same.update(phases)
        elif phases:
            found.append((one, phases))
    return found


def _phases(config: Config, arm: Arm) -> Iterator[tuple[str, Phase]]:
    """Decode at each concurrency; prefill of one prompt on each data-parallel rank."""
    if config.load.arrival is ArrivalKind.closed:
        for concurrency in config.load.concurrency:
            tokens = decode_tokens(arm, concurrency)
            yield f"decode_{tokens}", Phase(tokens, _ITERATIONS["decode"])
    for shape in config.load.shapes:
        prompt, _ = lengths_of(shape)
        if prompt is not None:
            tokens = prefill_tokens(arm, prompt)
            yield f"prefill_{tokens}", Phase(tokens, _ITERATIONS["prefill"])


def _alone(
    config: Config,
    one: _Collective,
    phases: Mapping[str, Phase],
    shape: Mapping[str, Any],
    device: DeviceKind,
) -> Config:
    """An all-to-all experiment; rows are BF16 both ways, as vLLM gathers and scatters them."""
    graphs = device is DeviceKind.cuda and not one.eager
    name, options = _BACKENDS[one.name]
    return replace(
        config,
        measure=[Measure.a2a],
        isolate=False,
        transport=one.transport,
        backend=Backend(name, dict(options)),
        against=Against(skip_unavailable=True),
        workload=Workload(
            hidden=int(shape["hidden_size"]),
            experts=int(shape["experts"]),
            topk=int(shape["num_experts_per_tok"]),
            ep=[one.ranks],
            local_tp=one.tp,
            phases=dict(phases),
            routing=[RoutingKind.uniform],
            launch=[LaunchKind.eager, LaunchKind.graph] if graphs else [LaunchKind.eager],
            split=False,
            dispatch_dtype=Dtype.bf16,
            combine_dtype=Dtype.bf16,
        ),
    )
