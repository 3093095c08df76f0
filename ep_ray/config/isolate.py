"""The further arms of `isolate`: what a router adds, without it or without engines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ep_ray.config.kinds import ArmKind, RouterPolicy
from ep_ray.config.serving import Arm, Transport
from ep_ray.layout import endpoints


def direct_name(arm: str) -> str:
    """Name of an arm's twin without a router."""
    return f"{arm}_direct"


def null_name(ranks: int, policy: str) -> str:
    """Name of the arm of null engines behind a router; `none` for the one without."""
    return f"null_x{ranks}_{'direct' if policy == RouterPolicy.none.name else policy}"


def further_arms(asked: Sequence[tuple[Arm, RouterPolicy]]) -> Iterator[Arm]:
    """The arms that isolate the routers of an experiment's arms.

    For each arm behind a router its twin without one, which shares its engines; and null engines,
    as many as it has API servers, behind the same router and without.

    Args:
        asked: The experiment's arms, each with the policy of its router.
    """
    routed = [(arm, policy) for arm, policy in asked if policy is not RouterPolicy.none]
    for arm, _ in routed:
        if not arm.rank_urls:  # else the running server's own URL is not its ranks in turn
            yield replace(arm, name=direct_name(arm.name), router=RouterPolicy.none)
    behind = dict.fromkeys((endpoints(arm), policy) for arm, policy in routed)
    for ranks in dict.fromkeys(ranks for ranks, _ in behind):
        for policy in [p for n, p in behind if n == ranks] + [RouterPolicy.none]:
            yield Arm(
                name=null_name(ranks, policy.name),
                kind=ArmKind.null_engine,
                dp=ranks,
                router=policy,
                transport=Transport(),
            )
