"""FP8 (e4m3) rows with one float32 scale per 128 columns."""

from __future__ import annotations

import torch

from ep_ray.backends.base import SCALE_BLOCK, Tokens

FP8_MAX = 448.0
"""Largest finite e4m3 value."""


def quantise(rows: torch.Tensor, *, power_of_two: bool = False) -> Tokens:
    """Quantises `[T, H]` rows block by block.

    Args:
        rows: Any float type; H is a multiple of 128.
        power_of_two: Rounds each scale up to a power of two, which makes multiplying by it exact.

    Returns:
        float8_e4m3fn rows and float32 scales `[T, H / 128]`; row = FP8 value x scale.
    """
    blocks = _blocks(rows.float())
    largest = blocks.abs().amax(dim=2)
    scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    if power_of_two:
        scales = _next_power_of_two(scales)
    small = (blocks / scales.unsqueeze(2)).clamp(-FP8_MAX, FP8_MAX)
    return Tokens(small.flatten(1).to(torch.float8_e4m3fn), scales)


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    # The block count is spelt out, since -1 is ambiguous for a rank that received no rows.
    return rows.reshape(len(rows), rows.shape[1] // SCALE_BLOCK, SCALE_BLOCK)


def _next_power_of_two(values: torch.Tensor) -> torch.Tensor:
    # frexp is exact where log2 would round: value = mantissa x 2 ** exponent, 0.5 <= mantissa < 1.
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.ones_like(values), exponent - (mantissa == 0.5).to(exponent.dtype))


def dequantise(tokens: Tokens) -> torch.Tensor:
    """Returns `[T, H]` float32; bfloat16 rows are widened."""
    rows = tokens.rows.float()
    if tokens.scales is None:
        return rows
    return (_blocks(rows) * tokens.scales.unsqueeze(2)).flatten(1)
