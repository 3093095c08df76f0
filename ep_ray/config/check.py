"""Combinations that cannot run, found before anything starts. Pure: looks at no machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from ep_ray.config.check_load import check_load
from ep_ray.config.check_workload import backends_of, check_workload
from ep_ray.config.errors import ConfigError
from ep_ray.config.isolate import further_arms
from ep_ray.config.schema import (
    Arm,
    ArmKind,
    Config,
    Measure,
    RouterPolicy,
    Transport,
    TransportKind,
)
from ep_ray.inventory import ENV_PREFIXES
from ep_ray.layout import has_engines

MADE = ("tiny", "lite", "tiny_dense")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ALLOWED = "use letters, digits, '.', '_', '-', and begin with a letter or digit"

# Wide TP stays inside one node, so no NIC carries it.
ARM_TRANSPORTS = {
    ArmKind.wide_tp: set(TransportKind) - {TransportKind.ib, TransportKind.efa},
    ArmKind.external_dp: set(TransportKind),
    ArmKind.internal_dp: set(TransportKind) - {TransportKind.ib, TransportKind.efa},
    ArmKind.hybrid_dp: set(TransportKind),
    ArmKind.attached: {TransportKind.auto},
    ArmKind.null_engine: {TransportKind.auto},
}  # fmt: skip
BACKEND_TRANSPORTS = {
    "gloo": {TransportKind.auto, TransportKind.tcp},
    "nccl": set(TransportKind),
    "auto": set(TransportKind),
}


def check(config: Config) -> None:
    """Raises `ConfigError` listing every problem of an experiment.

    Raises:
        ConfigError: What was asked, what is possible, and which key mends it.
    """
    problems = list(_general(config))
    if Measure.a2a in config.measure:
        problems += [*check_workload(config), *_backends(config)]
    if Measure.serving in config.measure:
        problems += _serving(config)
    if problems:
        raise ConfigError("\n".join(problems))


def arms_of(config: Config) -> list[Arm]:
    """The arm under test, those it is compared with, and those that isolate their routers."""
    asked = [config.arm, *config.against.arms.values()]
    if not config.isolate:
        return asked
    return [*asked, *further_arms([(arm, router_of(config, arm)) for arm in asked])]


def transport_of(config: Config, arm: Arm) -> Transport:
    """The transport that an arm asks for: its own, or the experiment's."""
    return arm.transport or config.transport


def router_of(config: Config, arm: Arm) -> RouterPolicy:
    """The router policy of an arm: its own, or the experiment's."""
    return arm.router or config.router.policy


def requests_of(config: Config, concurrency: int) -> int:
    """Measured requests of a cell: enough to fill the closed loop several times."""
    return max(config.load.min_requests, config.load.requests_per_slot * concurrency)


def requests_at(config: Config, rate_per_s: float) -> int:
    """Measured requests of an open loop's cell: as many as arrive in its time."""
    return max(config.load.min_requests, round(rate_per_s * config.load.duration_s))


def _general(config: Config) -> Iterator[str]:
    if not config.measure:
        yield "`measure` is empty: name a2a, serving or both"
    if not _NAME.fullmatch(config.name):
        yield f"`name={config.name}` becomes a folder's name: {_ALLOWED}"
    if config.isolate and Measure.serving not in config.measure:
        yield "`isolate=true` takes serving arms apart, and `measure` has no serving"
    if config.repeats < 1:
        yield f"`repeats={config.repeats}`: at least 1"
    if config.cluster.ranks_per_gpu < 1:
        yield f"`cluster.ranks_per_gpu={config.cluster.ranks_per_gpu}`: at least 1"
    for key, transport in _transports(config):
        if config.cluster.ranks_per_gpu > 1 and transport.kind is not TransportKind.tcp:
            yield (
                f"`{key}` is {transport.kind.name}: NCCL takes ranks that share a GPU "
                "(cluster.ranks_per_gpu) only over transport=tcp"
            )
        for name in transport.env:
            if not name.startswith(ENV_PREFIXES):
                yield f"`{key}.env.{name}`: only {', '.join(ENV_PREFIXES)} variables are recorded"


def _transports(config: Config) -> Iterator[tuple[str, Transport]]:
    yield "transport", config.transport
    for arm in arms_of(config):
        if arm.transport:
            yield f"transport of arm {arm.name}", arm.transport


def _backends(config: Config) -> Iterator[str]:
    for name, backend in backends_of(config):
        if not _NAME.fullmatch(name):
            yield f"backend `{name}`: {_ALLOWED}"
        allowed = BACKEND_TRANSPORTS.get(backend.name, set(TransportKind))
        if config.transport.kind not in allowed:
            yield _transport_problem("transport", config.transport.kind, backend.name, allowed)


def _serving(config: Config) -> Iterator[str]:
    arms = arms_of(config)
    names = [arm.name for arm in arms]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"two arms are called `{name}`: give each its own `name`"
    for name in names:
        if not _NAME.fullmatch(name):
            yield f"arm `{name}` names actors and log files: {_ALLOWED}"
    for arm in arms:
        yield from _arm(config, arm)
    yield from _processes(config)
    yield from check_load(config)
    if config.model.made not in (None, *MADE):
        yield f"`model.made={config.model.made}`: allowed: {', '.join(MADE)}, null"
    serves = any(has_engines(arm) for arm in arms)
    if serves and config.model.made is None and not config.model.path:
        yield "`model.path` is empty: give a folder or a hub id, or model.made=tiny"


def _processes(config: Config) -> Iterator[str]:
    """What stands against several processes of one router."""
    count = config.router.processes
    if count < 1:
        yield f"`router.processes={count}`: at least 1"
    if count <= 1:
        return
    policies = {router_of(config, arm) for arm in arms_of(config)}
    if not policies - {RouterPolicy.none, RouterPolicy.vllm_router}:
        words = ", ".join(sorted(policy.name for policy in policies))
        yield (
            f"`router.processes={count}` with router={words}: only ep-ray's own router runs as "
            "several processes; choose router=round_robin, random or session, or leave it out"
        )
    if RouterPolicy.least_inflight in policies:
        yield (
            f"`router.processes={count}` with router=least_inflight: each process sees only the "
            "requests that it forwards itself; set router.processes=1, or choose "
            "router=round_robin, random or session"
        )
    if not config.router.port:
        yield f"`router.processes={count}` with router.port=0: they share a port; name a free one"


def _arm(config: Config, arm: Arm) -> Iterator[str]:
    where = "arm" if arm is config.arm else f"against.arms.{arm.name}"
    transport = transport_of(config, arm).kind
    if transport not in ARM_TRANSPORTS[arm.kind]:
        yield _transport_problem(where, transport, arm.kind.name, ARM_TRANSPORTS[arm.kind])
    if router_of(config, arm) is RouterPolicy.session and not config.load.sessions:
        yield (
            f"`{where}`: router=session keeps a session at one rank, and load.sessions=0: no "
            "request belongs to one. Set load.sessions=N"
        )
    if arm.kind is ArmKind.attached:
        yield from _attached(arm, router_of(config, arm), where)
        return
    if arm.kind is ArmKind.null_engine:
        yield from _null_engine(arm, where)
    if arm.tp < 1 or arm.dp < 1:
        yield f"`{where}`: tp={arm.tp} and dp={arm.dp} are at least 1"
        return
    if arm.kind is ArmKind.wide_tp and arm.dp != 1:
        yield f"`{where}.dp={arm.dp}`: wide_tp is one engine; use kind external_dp for dp > 1"
    yield from _dp_local(arm, where)
    if arm.url or arm.rank_urls:
        yield f"`{where}.url`: only kind attached measures a running server; choose arm=attached"
    yield from _experts(config, arm, where)


def _dp_local(arm: Arm, where: str) -> Iterator[str]:
    local = arm.dp_local
    if arm.kind is not ArmKind.hybrid_dp:
        if local is not None:
            yield f"`{where}.dp_local={local}`: only kind hybrid_dp groups ranks behind servers"
    elif local is None or local < 1 or arm.dp % local:
        divisors = [str(n) for n in range(1, arm.dp + 1) if arm.dp % n == 0]
        yield (
            f"`{where}.dp_local={local}`: ranks behind each server must divide dp={arm.dp}; "
            f"possible: {', '.join(divisors)}"
        )


def _experts(config: Config, arm: Arm, where: str) -> Iterator[str]:
    size = arm.tp * arm.dp
    if arm.ep is not None and not arm.enable_ep:
        yield f"`{where}.ep={arm.ep}` with {where}.enable_ep=false: drop one of them"
    if arm.enable_ep and arm.ep not in (None, size):
        yield (
            f"`{where}.ep={arm.ep}`: with EP on, vLLM spreads experts over tp x dp = "
            f"{arm.tp} x {arm.dp} = {size}; set {where}.ep={size}, or change tp or dp"
        )
    experts = config.model.experts
    if arm.enable_ep and experts == 0:
        yield f"`{where}.enable_ep=true`: model `{config.model.name}` is dense, it has no experts"
    if arm.enable_ep and experts and experts % size:
        yield (
            f"`{where}`: {experts} experts of model `{config.model.name}` do not divide over "
            f"EP {size} (tp {arm.tp} x dp {arm.dp})"
        )


def _attached(arm: Arm, router: RouterPolicy, where: str) -> Iterator[str]:
    if not arm.url:
        yield f"`{where}.url` is missing: {where}.url=http://HOST:PORT of the running server"
    for url in [arm.url or "", *arm.rank_urls]:
        if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
            yield f"`{url}` is no URL: write http://HOST:PORT"
    if router is RouterPolicy.none:
        return
    for url in arm.rank_urls or [arm.url or ""]:
        parts = urlsplit(url)
        if parts.scheme == "https" or parts.path.strip("/"):
            yield (
                f"`{where}.router={router.name}` with `{url}`: a router speaks to "
                "http://HOST:PORT, without a path"
            )


def _null_engine(arm: Arm, where: str) -> Iterator[str]:
    if arm.tp != 1 or arm.enable_ep:
        yield (
            f"`{where}`: tp={arm.tp} and enable_ep={arm.enable_ep}, and a null_engine has no model "
            "to spread: leave both out; dp is the number of engines"
        )


def _transport_problem(
    where: str, kind: TransportKind, who: str, allowed: set[TransportKind]
) -> str:
    words = ", ".join(sorted(t.name for t in allowed))
    return f"`{where}` asks for transport={kind.name}, which {who} cannot have; allowed: {words}"
