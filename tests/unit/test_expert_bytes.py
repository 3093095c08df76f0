"""The least that experts send, against a step-by-step count of what vLLM moves."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_ray.config.schema import Arm, ArmKind
from serving.expert_bytes import expert_bytes, moe_layers, processed_tokens
from serving.models import make

CONFIG = {
    "hidden_size": 256, "num_experts_per_tok": 2, "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
}  # fmt: skip


def arm(**change: Any) -> Arm:
    return Arm(**({"name": "x", "kind": ArmKind.external_dp, "dp": 2, "enable_ep": True} | change))


def request(prompt: int | None, completion: int | None) -> Any:
    return SimpleNamespace(prompt_tokens=prompt, completion_tokens=completion)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_two_ranks_by_hand(folder: Path) -> None:
    # 3 MoE layers, 1 peer, (4 x 256 + 8 x 2) bytes, 10 + 4 tokens.
    assert expert_bytes(arm(), folder, [request(10, 5)]) == 3 * 1 * 1040 * 14


@pytest.mark.parametrize(
    "change", [{"enable_ep": False}, {"dp": 1}, {"all2all_backend": "deepep_low_latency"}]
)
def test_unknown_where_nothing_or_something_else_is_sent(
    folder: Path, change: dict[str, Any]
) -> None:
    assert expert_bytes(arm(**change), folder, [request(10, 5)]) is None


def test_unknown_for_a_config_that_does_not_say_which_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "num_hidden_layers": 2}))
    assert expert_bytes(arm(), tmp_path, [request(10, 5)]) is None


def test_made_model(tmp_path: Path) -> None:
    config = json.loads((make("tiny", tmp_path) / "config.json").read_text())
    assert moe_layers(config) == 1
    assert moe_layers(CONFIG | {"moe_layer_freq": 2}) == 1  # layer 2 of 1, 2, 3


def test_tokens_that_were_never_counted() -> None:
    assert processed_tokens([request(None, None), request(7, 0), request(7, 1)]) == 14


@given(st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=8))
def test_never_more_than_padded_steps_move(steps: list[list[int]]) -> None:
    """`steps` holds each step's rows per rank; the bound knows only their sum."""
    ranks, hidden, topk = 3, 256, 2
    tokens = sum(map(sum, steps))
    moved = sum(
        ranks * (ranks - 1) * max(rows) * (2 * hidden + 8 * topk + 2 * hidden) for rows in steps
    )
    assert (ranks - 1) * (4 * hidden + 8 * topk) * tokens <= moved
