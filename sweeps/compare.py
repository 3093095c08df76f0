"""Matching a sweep's cells with published ones: only where they coincide, with words elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sweeps.published.data import ARMS, RDMA, TCP, WIDE_TP, AllToAllRow, ServingRow
from sweeps.results import Trial

# Published fabrics by the transport that a trial asks for.
_FABRICS = {"efa": "efa", "ib": "cx7"}
_EXTERNAL_DP = {"tcp": TCP, "ib": RDMA}
_TEXT = " text"  # what a shape of text prompts ends with


@dataclass(frozen=True)
class ArmMatch:
    """An arm of a sweep and its published counterpart; `why_not` says why there is none."""

    label: str
    published: str | None
    why_not: str = ""


@dataclass(frozen=True)
class Overlap:
    """Which keys coincide, and which stand on one side only."""

    both: tuple[tuple[str, int], ...]
    only_here: tuple[tuple[str, int], ...]
    only_published: tuple[tuple[str, int], ...]


def match_arm(label: str, found: Sequence[Trial]) -> ArmMatch:
    """The published arm of these trials, which share a label.

    Wide TP is matched by name; External DP by name and by the transport asked for, unless a
    trial's evidence contradicts that transport.
    """
    trial = found[0]
    for other in found:
        if other.transport_status == "contradicted":
            asked, seen = other.transport_asked, other.transport_seen
            return ArmMatch(label, None, f"asked for {asked}, but {seen} was seen")
        if other.shared_gpu:
            return ArmMatch(label, None, "its ranks shared a GPU")
    if trial.arm == WIDE_TP:
        return ArmMatch(label, WIDE_TP)
    published = _EXTERNAL_DP.get(trial.transport_asked or "")
    if published is None or trial.arm not in ("external_dp", published):
        over = trial.transport_asked or "no stated transport"
        return ArmMatch(label, None, f"no published arm is {trial.arm} over {over}")
    return ArmMatch(label, published)


def overlap(here: Iterable[tuple[str, int]], published: Iterable[tuple[str, int]]) -> Overlap:
    """Compare two sets of (shape, concurrency), each in its own order."""
    ours, theirs = list(dict.fromkeys(here)), list(dict.fromkeys(published))
    return Overlap(
        tuple(key for key in ours if key in theirs),
        tuple(key for key in ours if key not in theirs),
        tuple(key for key in theirs if key not in ours),
    )


def published_shapes(shapes: Iterable[str]) -> dict[str, str]:
    """The published shape that each shape of a sweep stands for, or its own name where none.

    The published prompts were text, and random token ids of the same length stand for it too;
    where a sweep has both, the text does.
    """
    own = list(dict.fromkeys(shapes))
    bare = {shape: shape.removesuffix(_TEXT) for shape in own}
    return {
        shape: f"{shape} token_ids" if f"{shape}{_TEXT}" in own else name
        for shape, name in bare.items()
    }


def published_cells(rows: Sequence[ServingRow], arm: str) -> dict[tuple[str, int], ServingRow]:
    """Published rows of one arm by (shape, concurrency)."""
    return {(row.shape, row.concurrency): row for row in rows if row.arm == arm}


def unmatched_arms(matches: Sequence[ArmMatch]) -> list[str]:
    """Published arms that no arm of the sweep stands for."""
    return [arm for arm in ARMS if arm not in {m.published for m in matches}]


def same_all_to_all(row: AllToAllRow, trial: Trial) -> bool:
    """Whether a trial measures what a published all-to-all row did, as far as the row says.

    The published rows do not state their routing; only uniform routing of as many tokens on every
    rank is held against them, whatever the way of measuring.
    """
    if trial.routing != "uniform" or trial.transport_status == "contradicted":
        return False
    if (
        trial.masked_share
        or trial.tokens_per_rank not in (None, "uniform")
        or trial.local_tp not in (None, 1)
    ):
        return False
    return (row.workload, row.tokens, row.ep_size, row.backend, row.transport) == (
        trial.phase,
        trial.tokens,
        trial.ep,
        trial.backend,
        _FABRICS.get(trial.transport_asked or ""),
    )


def words(keys: Sequence[tuple[str, int]], prefix: str = "c") -> str:
    """`1024/256 c1 c4; 4096/128 c1`, or `none`."""
    shapes: dict[str, list[str]] = {}
    for shape, number in keys:
        shapes.setdefault(shape, []).append(f"{prefix}{number}")
    return "; ".join(f"{shape} {' '.join(cs)}" for shape, cs in shapes.items()) or "none"
