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


def servers(arm: Arm) -> int:
    """API servers that ep-ray starts for an arm; none for one that runs already."""
    return 0 if arm.kind is ArmKind.attached else arm.dp // ranks_per_server(arm)


def gpus_per_server(arm: Arm) -> int:
    """GPUs of one server; they lie in one node."""
    return arm.tp * ranks_per_server(arm)
