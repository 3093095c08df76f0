"""Timings of one rank as they are collected: samples, and how each operation was warmed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ep_ray.a2a.stats import Samples, concat, series


@dataclass
class Measured:
    """Timings of one rank.

    Attributes:
        rank: This rank.
        warmups: Warm-up iterations by operation, in the order in which they were measured.
        loop: Operations within one sample.
    """

    rank: int
    warmups: dict[str, int] = field(default_factory=dict)
    loop: int = 1
    _parts: list[Samples] = field(default_factory=list)

    def add(self, op: str, role: str, durations_ns: Sequence[int]) -> None:
        """Appends consecutive timings of one operation."""
        self._parts.append(series(op, role, self.rank, durations_ns))

    def samples(self) -> Samples:
        """All timings."""
        return concat(self._parts)
