"""From an all-to-all trial to what its ranks are told. Pure, but for the routing file."""

from __future__ import annotations

from ep_ray.a2a.procedure import Procedure
from ep_ray.a2a.routing_file import RoutingTable, read_routing
from ep_ray.backends import registry
from ep_ray.backends.base import Spec
from ep_ray.config.schema import Config, DeviceKind, LaunchKind
from ep_ray.watchdog import TrialError
from sweeps.outcome import UNAVAILABLE
from sweeps.trial import A2aTrial


def spec_of(config: Config, trial: A2aTrial, device: DeviceKind) -> Spec:
    """The workload point of a trial."""
    work = config.workload
    return Spec(
        ep=trial.ep,
        tokens=trial.tokens // work.local_tp,
        hidden=work.hidden,
        experts=work.experts,
        topk=work.topk,
        dispatch_dtype=work.dispatch_dtype,
        combine_dtype=work.combine_dtype,
        device=device.name,
        graph=trial.launch is LaunchKind.graph,
        ragged=work.tokens_per_rank != "uniform",
        shared_gpu=shares_gpu(config, trial, device),
    )


def shares_gpu(config: Config, trial: A2aTrial, device: DeviceKind) -> bool:
    """Whether two ranks of the trial sit on one GPU; ranks that it leaves idle do not count."""
    return device is DeviceKind.cuda and min(config.cluster.ranks_per_gpu, trial.ep) > 1


def procedure_of(config: Config, trial: A2aTrial) -> Procedure:
    """How a trial is measured."""
    work = config.workload
    asked = work.tokens_per_rank
    return Procedure(
        iterations=trial.iterations,
        seed=config.seed,
        routing=trial.routing,
        zipf_exponent=work.zipf_exponent,
        min_warmup=work.min_warmup,
        max_warmup=work.max_warmup,
        warmup_tolerance=work.warmup_tolerance,
        check=work.check,
        masked_share=work.masked_share,
        tokens_per_rank=asked if isinstance(asked, str) else tuple(asked),
        local_tp=work.local_tp,
        split=work.split,
        overlap_us=work.overlap_us,
        compat=trial.compat,
    )


def refuse(config: Config, trial: A2aTrial, device: DeviceKind) -> None:
    """Raises `TrialError` where the backend's capabilities exclude the trial.

    Asked before a rank is: ranks that run stay up for the next trial.
    """
    try:
        backend = registry.load(trial.backend.name, trial.backend.options)
        reasons = backend.capabilities.refusals(spec_of(config, trial, device))
    except ValueError as error:
        reasons = [str(error)]
    if reasons:
        status = UNAVAILABLE if config.against.skip_unavailable else "failed"
        raise TrialError(status, f"{trial.arm} cannot run this: " + "; ".join(reasons))


def read_table(config: Config) -> RoutingTable:
    """The choices that `file` routing reads, on the driver's machine.

    Raises:
        TrialError: The file cannot be used.
    """
    work = config.workload
    try:
        return read_routing(work.routing_file or "", work.experts, work.topk)
    except ValueError as error:
        raise TrialError("failed", str(error)) from error
