from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ep_ray.a2a.links import node_size
from ep_ray.backends import registry
from ep_ray.backends.base import Spec, row_bytes
from ep_ray.config.schema import Dtype


def spec(**changes: Any) -> Spec:
    return Spec(**({"ep": 4, "tokens": 8, "hidden": 512, "experts": 32, "topk": 4} | changes))


def test_rows_carry_scales_only_in_fp8() -> None:
    assert row_bytes(7168, Dtype.fp8) == 7392
    assert row_bytes(7168, Dtype.bf16) == 14336


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 30}, "30 experts do not divide over 4 ranks"),
        ({"topk": 33}, "topk 33"),
        ({"tokens": 0}, "tokens 0"),
        ({"hidden": 500}, "hidden 500 is not a multiple of 128"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**change)


def test_an_unknown_backend_names_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"one of .*gloo, .*nccl.* Did you mean 'nccl'"):
        registry.load("ncl")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['chunks'\] are unknown"):
        registry.load("gloo", {"chunks": 4})


def test_an_adapter_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys; from ep_ray.backends.registry import load; load('gloo');"
        "sys.exit('ep_ray.backends.nccl' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_gloo_runs_here_and_nccl_says_why_not() -> None:
    assert registry.load("gloo").probe({}) == []
    if not torch.cuda.is_available():
        assert any("no CUDA GPU" in reason for reason in registry.load("nccl").probe({}))


def test_refusals_name_what_was_asked_and_what_is_possible() -> None:
    can = replace(registry.load("gloo").capabilities, ep_sizes=frozenset({2, 8}))
    asked = spec(device="cuda", combine_dtype=Dtype.fp8)
    assert can.refusals(asked) == [
        "device cuda: it runs on cpu",
        "combine in fp8: it carries bf16",
        "EP4: it runs at [2, 8]",
    ]
    assert can.refusals(spec(ep=2)) == []


def test_wire_bytes_spell_out_payload_metadata_and_counts() -> None:
    backend: Any = registry.load("gloo")
    backend.spec = spec(ep=2, tokens=1)
    # Rank 0's token goes to both ranks, rank 1's to none.
    found = backend.wire_bytes(np.array([[[0, 1, 16, 17]], [[-1, -1, -1, -1]]]))
    row = 512 + 4 * 4 + 4 * (4 + 4)
    assert found.dispatch.tolist() == [[0, row + 8], [8, 0]]
    assert found.combine.tolist() == [[0, 0], [2 * 512, 0]]


def test_ranks_must_lie_evenly_and_in_order_on_nodes() -> None:
    assert node_size(["a", "a", "b", "b"]) == 2
    assert node_size(["a"]) == 1
    for hosts in (["a", "b", "a", "b"], ["a", "a", "b"], ["a", "b", "b"]):
        with pytest.raises(ValueError, match="not spread evenly"):
            node_size(hosts)
