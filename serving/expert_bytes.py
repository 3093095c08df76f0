"""The least that vLLM's experts send between data-parallel ranks, from the tokens of a cell.

With `allgather_reducescatter`, each MoE layer of each step gathers the rows of all N
data-parallel ranks, padded to the longest: m rows each. Every rank receives
(N - 1) m (2H + 8K) bytes in dispatch (BF16 rows, top-k ids and weights) and (N - 1) m 2H in
combine. N m is at least the number of tokens of the step, so that over a cell all ranks
together receive at least (N - 1) (4H + 8K) bytes per token and MoE layer. Padding, idle ranks'
steps and a TP group's further copies only add to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

_BACKEND = "allgather_reducescatter"


class Request(Protocol):
    """What is read of a finished request."""

    @property
    def prompt_tokens(self) -> int | None: ...

    @property
    def completion_tokens(self) -> int | None: ...


def expert_bytes(arm: Any, model_folder: Path, requests: Iterable[Request]) -> int | None:
    """Bytes that all ranks together received at least; None where they are not known.

    Args:
        arm: `ep_ray.config.schema.Arm`, or a node of the same shape.
        model_folder: Holds the model's `config.json`.
        requests: Complete requests of a cell, of all roles.
    """
    if not arm.enable_ep or arm.dp < 2 or arm.all2all_backend != _BACKEND:
        return None
    config = model_config(model_folder)
    hidden, topk = config.get("hidden_size"), config.get("num_experts_per_tok")
    layers = moe_layers(config)
    if not hidden or not topk or not layers:
        return None
    row_bytes = 4 * int(hidden) + 8 * int(topk)
    return layers * (int(arm.dp) - 1) * row_bytes * processed_tokens(requests)


def model_config(model_folder: Path) -> dict[str, Any]:
    """The text model's part of a model folder's `config.json`."""
    config: dict[str, Any] = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config") or config


def moe_layers(config: dict[str, Any]) -> int | None:
    """Layers with routed experts, of a config that says which (DeepSeek's keys); else None."""
    layers, dense = config.get("num_hidden_layers"), config.get("first_k_dense_replace")
    if layers is None or dense is None:
        return None
    every = config.get("moe_layer_freq") or 1
    return sum(1 for layer in range(dense, layers) if layer % every == 0)


def processed_tokens(requests: Iterable[Request]) -> int:
    """Tokens that went through the model: prompts, and completions but for their last token."""
    return sum(
        (request.prompt_tokens or 0) + max(0, (request.completion_tokens or 0) - 1)
        for request in requests
    )
