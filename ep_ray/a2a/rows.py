"""Bytes of the rows that travel. Imports neither torch nor numpy: reports read it too."""

from __future__ import annotations

from typing import Literal

from ep_ray.config.schema import Dtype

Dedup = Literal["none", "rank", "node"]
SCALE_BLOCK = 128
"""Columns that share one float32 scale in an FP8 row."""


def row_bytes(hidden: int, dtype: Dtype) -> int:
    """Bytes of one row of `hidden` columns, scales included for FP8."""
    if dtype is Dtype.fp8:
        return hidden + 4 * (hidden // SCALE_BLOCK)
    return 2 * hidden
