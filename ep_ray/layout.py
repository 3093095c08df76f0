"""How many servers an arm has, and how many GPUs each of them takes. Pure."""

from __future__ import annotations

from ep_ray.config.schema import Arm, ArmKind


def ranks_per_server(arm: Arm) -> int:
    """Data-parallel ranks behind one API server.

    One for `external_dp`, all for `internal_dp`, `dp_local` for `hybrid_dp`.
    """
    if arm.kind is ArmKind.internal_dp:
        return arm.dp
    if arm.kind is ArmKind.hybrid_dp:
        return arm.dp_local or 1
    return 1


def has_engines(arm: Arm) -> bool:
    """Whether ep-ray starts vLLM for an arm."""
    return arm.kind not in (ArmKind.attached, ArmKind.null_engine)


def servers(arm: Arm) -> int:
    """API servers of vLLM that ep-ray starts for an arm."""
    return arm.dp // ranks_per_server(arm) if has_engines(arm) else 0


def endpoints(arm: Arm) -> int:
    """What a router in front of an arm chooses from."""
    if arm.kind is ArmKind.attached:
        return len(arm.rank_urls) or 1
    return servers(arm) or arm.dp


def gpus_per_server(arm: Arm) -> int:
    """GPUs of one server; they lie in one node."""
    return arm.tp * ranks_per_server(arm)
