from __future__ import annotations

import pytest
import torch

from ep_ray.a2a.check import decode, encode
from ep_ray.a2a.quantise import dequantise, quantise
from ep_ray.backends.base import Tokens


def random_rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 512, generator=generator) * torch.logspace(-6, 6, 64)[:, None]


@pytest.mark.parametrize("power_of_two", [False, True])
def test_error_stays_within_half_a_step(power_of_two: bool) -> None:
    rows = random_rows()
    tokens = quantise(rows, power_of_two=power_of_two)
    assert tokens.rows.dtype == torch.float8_e4m3fn
    assert tokens.scales is not None
    assert tokens.scales.shape == (64, 4)
    # e4m3 keeps 4 significant bits: half a step is 2 ** -4 of a normal value, and an
    # absolute 2 ** -10 scales below the smallest normal one.
    step = tokens.scales.repeat_interleave(128, dim=1) * 2.0**-10
    allowed = torch.maximum(rows.abs() * 2.0**-4, step) * 1.0001
    assert bool(((dequantise(tokens) - rows).abs() <= allowed).all())


def test_exact_scales_use_the_whole_range() -> None:
    tokens = quantise(random_rows())
    blocks = tokens.rows.float().reshape(64, 4, 128)
    assert bool((blocks.abs().amax(2) == 448).all())


def test_power_of_two_scales_are_the_smallest_that_fit() -> None:
    tokens = quantise(random_rows(), power_of_two=True)
    assert tokens.scales is not None
    mantissa, _ = torch.frexp(tokens.scales)
    assert bool((mantissa == 0.5).all())
    largest = tokens.rows.float().reshape(64, 4, 128).abs().amax(2)
    assert bool(((largest > 223) & (largest <= 448)).all())


def test_a_block_that_fits_exactly_is_not_scaled_further() -> None:
    rows = torch.zeros(1, 128)
    rows[0, 0] = 448.0 * 4
    scales = quantise(rows, power_of_two=True).scales
    assert scales is not None
    assert scales.item() == 4.0


def test_zeros_and_no_rows() -> None:
    assert dequantise(quantise(torch.zeros(3, 256))).abs().sum() == 0
    assert dequantise(quantise(torch.zeros(0, 256))).shape == (0, 256)


def test_bfloat16_rows_are_widened() -> None:
    rows = torch.ones(2, 128, dtype=torch.bfloat16)
    assert dequantise(Tokens(rows)).dtype == torch.float32


def test_encoded_rows_survive_fp8_and_bf16_and_tell_who_they_are() -> None:
    rank = torch.tensor([0, 255, 17, 3])
    index = torch.tensor([0, 65535, 4095, 128])
    rows = encode(rank, index, 1, 7168)
    assert torch.equal(dequantise(quantise(rows, power_of_two=True)), rows)
    assert torch.equal(rows.to(torch.bfloat16).float(), rows)
    found_rank, found_index = decode(rows)
    assert torch.equal(found_rank, rank)
    assert torch.equal(found_index, index)
    # Shifting by a code group, or by a scale block, or another routing's row: all show.
    assert not torch.equal(rows.roll(8, dims=1), rows)
    assert not torch.equal(rows.roll(128, dims=1), rows)
    assert not torch.equal(encode(rank, index, 0, 7168), rows)


def test_nonsense_decodes_without_an_error() -> None:
    rank, index = decode(torch.tensor([[float("nan"), float("inf"), -5.0, 1e9] * 32]))
    assert (rank.shape, index.shape) == ((1,), (1,))
