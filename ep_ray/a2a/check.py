"""Whether a backend is right, before it is timed.

Tokens say who they are: each row encodes its source rank, its index and the number of the
routing in base-16 digits, repeated over all columns in a pattern that differs from one
8-column group to the next. Integers up to 15 times a power of two are exact in FP8 with
power-of-two scales and in BF16, so a received row must be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ep_ray.a2a.launch import Launch
from ep_ray.a2a.pool import CHECKED, Gathered, gather
from ep_ray.a2a.quantise import quantise
from ep_ray.a2a.routing import Routing, copies
from ep_ray.backends.base import SCALE_BLOCK, Backend, Capabilities, Dedup, Received, Spec, Tokens
from ep_ray.config.schema import Dtype

DIGITS = 8
"""Columns that carry the code: two digits of rank, four of index, two of routing number."""
CHUNK_ROWS = 1024
"""Rows compared at once, so that prefill does not double its memory."""
TOLERANCE = 2.0**-7
TOLERANCE_SUMMED_PER_RANK = 2.0**-6
"""Share of a row's largest reference value by which combine may be off: BF16 rounds once at
the end, and once more where each rank's partial sum is rounded before it travels."""


def check(
    backend: Backend,
    spec: Spec,
    group: ProcessGroup,
    device: torch.device,
    pool: Sequence[Routing],
    launch: Launch | None = None,
    everyone: Sequence[Gathered] | None = None,
) -> list[str]:
    """Runs `CHECKED` routings of `pool` through dispatch, experts and combine; collective.

    Args:
        launch: How operations are launched, graphs included; None is call by call.
        everyone: These routings of all ranks, from `gather`; None gathers them.

    Returns:
        What is wrong, over all ranks, the same list on each; empty when the backend is right.
    """
    faults = []
    launch = launch or Launch(backend, blank(backend, spec, device))
    if everyone is None:
        _, everyone = gather(pool[:CHECKED], spec.tokens, group, device)
    for number, (routing, of_all) in enumerate(zip(pool, everyone, strict=False)):
        found = _check_routing(backend, spec, group, device, routing, of_all, number, launch)
        faults += [f"routing {number}: {fault}" for fault in found]
    return _from_all_ranks(faults, group, device)


def _from_all_ranks(faults: list[str], group: ProcessGroup, device: torch.device) -> list[str]:
    # One number first: nearly always there are none, and every trial waits for this.
    count = torch.tensor([len(faults)], device=device)
    dist.all_reduce(count, group=group)
    if not int(count):
        return []
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, faults, group=group)
    return [f"rank {rank}, {fault}" for rank, of in enumerate(gathered) for fault in of]


def _check_routing(
    backend: Backend,
    spec: Spec,
    group: ProcessGroup,
    device: torch.device,
    routing: Routing,
    everyone: Gathered,
    number: int,
    launch: Launch,
) -> list[str]:
    rank, sent = dist.get_rank(group), len(routing.topk_idx)
    rows = encode(torch.full((spec.tokens,), rank), torch.arange(spec.tokens), number, spec.hidden)
    backend.poison()
    launch.load(routing, payload(backend, spec, rows.to(device)))
    # A peer may write into this rank's buffers: only once they are poisoned.
    _settle(backend, group, device)
    launch.call("dispatch")()
    faults = received_faults(backend.received(), everyone, spec, rank, number, backend.capabilities)
    backend.apply_experts(factors(spec.experts))
    _settle(backend, group, device)
    out = launch.combined()[:sent]
    return faults + combined_faults(out, routing, rows[:sent], backend.capabilities.sums_per_rank)


def _settle(backend: Backend, group: ProcessGroup, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if not backend.capabilities.two_sided:
        dist.barrier(group)


def payload(backend: Backend, spec: Spec, rows: torch.Tensor) -> Tokens:
    """Rows `[T, H]` in the form that `backend` takes: FP8 with scales, else BF16."""
    if spec.dispatch_dtype is Dtype.fp8 and not backend.capabilities.quantises_inside:
        return quantise(rows, power_of_two=True)
    return Tokens(rows.to(torch.bfloat16))


def blank(backend: Backend, spec: Spec, device: torch.device) -> Tokens:
    """Buffers for what `backend` takes, to be filled by `Launch.load`."""
    return payload(backend, spec, torch.zeros(spec.tokens, spec.hidden, device=device))


def factors(experts: int) -> torch.Tensor:
    """`[E]` float32: expert e multiplies its input by 1 + e mod 4."""
    return 1.0 + torch.arange(experts, dtype=torch.float32) % 4


def encode(rank: torch.Tensor, index: torch.Tensor, number: int, hidden: int) -> torch.Tensor:
    """Rows `[N, H]` float32 that name their source rank and index (`[N]`) and routing number."""
    device = index.device
    parts = [rank >> 4, rank, index >> 12, index >> 8, index >> 4, index]
    parts += [torch.full_like(index, number >> 4), torch.full_like(index, number)]
    digits = torch.stack([part & 15 for part in parts], dim=1).to(torch.uint8)
    column = torch.arange(hidden, device=device)
    # In bytes, an eighth of the memory traffic: every trial waits for this. They wrap at a
    # multiple of 16.
    values = (digits.repeat(1, hidden // DIGITS) + (column // DIGITS).to(torch.uint8)) & 15
    # Scales differ between neighbouring blocks, so that a misplaced scale shows.
    return values.float() * 2.0 ** ((column // SCALE_BLOCK) % 4)


def decode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Source rank and index (`[N]` int64) that rows claim; nonsense rows decode to nonsense."""
    digits = rows[:, :DIGITS].nan_to_num(0.0).clamp(0, 15).long()
    rank = digits[:, 0] * 16 + digits[:, 1]
    index = ((digits[:, 2] * 16 + digits[:, 3]) * 16 + digits[:, 4]) * 16 + digits[:, 5]
    return rank, index


def received_faults(
    got: Received, everyone: Gathered, spec: Spec, rank: int, number: int, can: Capabilities
) -> list[str]:
    """What is wrong with the rows that `rank` received; pure."""
    source, index = decode(got.rows)
    faults = _content_faults(got.rows, source, index, number, spec.hidden)
    faults += _count_faults(got, everyone, spec, rank, can.row_dedup)
    return faults + _choice_faults(got, source, index, everyone, spec, rank)


def _content_faults(
    rows: torch.Tensor, source: torch.Tensor, index: torch.Tensor, number: int, hidden: int
) -> list[str]:
    wrong = 0
    for at in range(0, len(rows), CHUNK_ROWS):
        part = slice(at, at + CHUNK_ROWS)
        expected = encode(source[part], index[part], number, hidden)
        wrong += int((rows[part] != expected).any(dim=1).sum())
    return [f"{wrong} of {len(rows)} received rows differ from what was sent"] if wrong else []


def _count_faults(
    got: Received, everyone: Gathered, spec: Spec, rank: int, dedup: Dedup
) -> list[str]:
    by_source = copies(everyone.topk_idx, spec.experts, spec.ep, dedup)[:, rank]
    by_expert = copies(everyone.topk_idx, spec.experts, spec.experts, "none").sum(axis=0)
    first = rank * spec.local_experts
    faults = []
    if len(got.rows) != by_source.sum():
        faults.append(f"{len(got.rows)} rows received, {by_source.sum()} expected")
    for word, counts, expected in (
        ("source", got.source_counts, by_source),
        ("expert", got.expert_counts, by_expert[first : first + spec.local_experts]),
    ):
        if counts is not None and counts.tolist() != expected.tolist():
            faults.append(f"counts per {word} {counts.tolist()}, expected {expected.tolist()}")
    return faults


def _choice_faults(
    got: Received,
    source: torch.Tensor,
    index: torch.Tensor,
    everyone: Gathered,
    spec: Spec,
    rank: int,
) -> list[str]:
    """Compares the multiset of (source, index, expert), and each one's weight."""
    here = got.topk_idx >= 0
    token = (source * spec.tokens + index).unsqueeze(1)
    keys = (token * spec.experts + got.topk_idx)[here].cpu().numpy()
    wanted, weights = _expected_choices(everyone, spec, rank)
    order = np.argsort(keys, kind="stable")
    if not np.array_equal(keys[order], wanted):
        missing = len(np.setdiff1d(wanted, keys))
        surplus = len(keys) - len(wanted) + missing
        return [f"(token, expert) pairs: {missing} missing, {surplus} repeated or not meant for it"]
    if got.weights is None:
        return []
    wrong = int((got.weights[here].cpu().numpy()[order] != weights).sum())
    return [f"{wrong} of {len(wanted)} router weights differ from what was sent"] if wrong else []


def _expected_choices(
    everyone: Gathered, spec: Spec, rank: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sorted keys (source x T + index) x E + expert of what `rank` must receive, and weights."""
    idx = everyone.topk_idx
    local = (idx >= 0) & (idx // spec.local_experts == rank)
    token = np.arange(idx.shape[0] * idx.shape[1]).reshape(*idx.shape[:2], 1)
    keys = (token * spec.experts + idx)[local]
    order = np.argsort(keys, kind="stable")
    return keys[order], everyone.weights[local][order]


def combined_faults(
    out: torch.Tensor, routing: Routing, rows: torch.Tensor, sums_per_rank: bool
) -> list[str]:
    """Compares combine's `[T, H]` with sum_k w_k (1 + e_k mod 4) x in fp64; pure."""
    if out.shape != rows.shape:
        return [f"combine returned {tuple(out.shape)}, expected {tuple(rows.shape)}"]
    factor = torch.where(routing.topk_idx >= 0, 1 + routing.topk_idx % 4, 0).double()
    total = (factor * routing.weights.double()).sum(dim=1, keepdim=True)
    tolerance = TOLERANCE_SUMMED_PER_RANK if sums_per_rank else TOLERANCE
    wrong = 0
    for at in range(0, len(rows), CHUNK_ROWS):
        part = slice(at, at + CHUNK_ROWS)
        reference = total[part] * rows[part].double()
        allowed = tolerance * reference.abs().amax(dim=1, keepdim=True)
        # `not <=` rather than `>`: a NaN must count as wrong.
        off = ~((out[part].cpu().double() - reference).abs() <= allowed)
        wrong += int(off.any(dim=1).sum())
    return [f"{wrong} of {len(rows)} combined rows are outside {tolerance}"] if wrong else []
