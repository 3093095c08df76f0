"""Whether a plan can run, on machines made up for the purpose."""

from __future__ import annotations

import copy
from functools import cache

import pytest

from ep_ray.config import schema as s
from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError
from ep_ray.cores import usable
from ep_ray.inventory import Gpu, Machine
from sweeps.available import backend_reasons
from sweeps.feasible import check_feasible, gpus_needed, ports_of, ranks_of, resolve_device
from sweeps.plan import plan

CUDA, CPU = s.DeviceKind.cuda, s.DeviceKind.cpu


@cache
def composed(*overrides: str) -> s.Config:
    (config,) = compose_all(overrides, multirun=False)
    return config


def machine(name: str, gpus: int, ib: int = 0, efa: int = 0) -> Machine:
    return Machine(
        hostname=name,
        cpu="cpu",
        cores=64,
        memory_gib=512.0,
        gpus=tuple(Gpu(i, "H200", f"GPU-{name}-{i}", 143771) for i in range(gpus)),
        ib=tuple(f"mlx5_{i}" for i in range(ib)),
        efa=tuple(f"rdmap{i}" for i in range(efa)),
        interfaces=("lo",),
    )


def reasons(config: s.Config, *machines: Machine) -> list[str]:
    """Reasons about hardware: those about this Python's software are left out."""
    device = resolve_device(config, machines)
    try:
        check_feasible(config, plan(config, device), device, machines, {})
    except ConfigError as error:
        *lines, advice = str(error).splitlines()
        assert advice.startswith("  `plan_only=true` shows the trials")
        software = ("asked: engines", "asked: a vLLM", "model.path=")
        return [line for line in lines if not line.startswith(software)]
    return []


def test_the_study_on_what_it_needs():
    config = composed("+exp=external_dp_rdma")
    assert reasons(config, machine("a", 8, ib=8)) == []


def test_too_few_gpus():
    config = composed("+exp=external_dp_rdma")
    assert reasons(config, machine("a", 4, ib=1), machine("b", 3, ib=1)) == [
        "asked: 8 GPUs for `external_dp_rdma` at 1024-256-c1; found: 7 on a (4 GPUs), b (3 GPUs). "
        "Run where they are (cluster=attached joins a Ray cluster), or ask for less (arm.tp=, "
        "arm.dp=, workload.ep=)"
    ]


def test_a_tp_group_stays_inside_one_node():
    config = composed("+exp=external_dp_rdma")
    assert reasons(config, machine("a", 4, ib=1), machine("b", 4, ib=1)) == [
        "asked: 1 TP groups of 8 GPUs, and a TP group stays inside one node; found: room for 0 on "
        "a (4 GPUs), b (4 GPUs). Lower arm.tp or arm.dp"
    ]


def test_tp_groups_leave_gpus_over():
    config = copy.deepcopy(composed("+exp=external_dp_tcp"))
    config.against.arms.clear()
    assert reasons(config, *(machine(name, 3) for name in "abc")) == [
        "asked: 4 TP groups of 2 GPUs, and a TP group stays inside one node; found: room for 3 on "
        "a (3 GPUs), b (3 GPUs), c (3 GPUs). Lower arm.tp or arm.dp"
    ]
    assert reasons(config, machine("a", 5), machine("b", 4)) == []


def test_all_to_all_ranks_spread_over_nodes():
    config = copy.deepcopy(composed("+exp=a2a_decode"))
    config.workload.ep = [8, 16]
    assert reasons(config, machine("a", 8), machine("b", 8)) == []
    (reason,) = reasons(config, machine("a", 8), machine("b", 7))
    assert reason.startswith("asked: 16 GPUs for `nccl` at decode-t128-ep16-uniform; found: 15 on")


@pytest.mark.parametrize(
    ("kind", "machines", "without"),
    [
        ("ib", (machine("a", 8),), "a (8 GPUs)"),
        ("ib", (machine("a", 8, ib=1), machine("b", 8)), "b (8 GPUs)"),
        ("ib", (machine("a", 8, efa=4),), "a (8 GPUs)"),
        ("efa", (machine("a", 8, ib=4),), "a (8 GPUs)"),
        ("ib", (machine("a", 8, ib=1),), None),
        ("efa", (machine("a", 8, efa=1),), None),
    ],
)
def test_every_node_needs_the_nics_that_are_asked_for(kind, machines, without):
    config = copy.deepcopy(composed("+exp=external_dp_tcp"))
    config.transport.kind = s.TransportKind[kind]
    expected = (
        f"asked: transport={kind}; found: no such device in /sys/class/infiniband on {without}. "
        "Choose transport=tcp or transport=auto, or run where the NICs are"
    )
    assert reasons(config, *machines) == ([expected] if without else [])


@pytest.mark.parametrize("kind", ["nvlink", "ib", "efa"])
def test_cpu_ranks_have_no_such_transport(kind):
    config = copy.deepcopy(composed("+exp=quickstart"))
    config.measure = [s.Measure.a2a]
    config.backend.name = "nccl"
    config.transport.kind = s.TransportKind[kind]
    found = reasons(config, machine("a", 0, ib=1, efa=1))
    assert found == [
        f"asked: transport {kind}; found: CPU ranks, which talk over tcp. transport=auto"
    ]


def test_all_to_all_on_the_cpu_runs_anywhere():
    config = copy.deepcopy(composed("+exp=quickstart"))
    config.measure = [s.Measure.a2a]
    check_feasible(config, plan(config, CPU), CPU, [machine("a", 0)], {})


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("nvshmem", {}, "backend 'nvshmem' is unknown; `backend.name` is one of gloo, nccl"),
        ("glo", {}, "Did you mean 'gloo'?"),
        ("gloo", {"chunk": 1}, "`backend.options` ['chunk'] are unknown"),
    ],
)
def test_a_backend_that_cannot_be_made(name, options, reason):
    config = copy.deepcopy(composed("+exp=quickstart"))
    config.measure = [s.Measure.a2a]
    config.backend = s.Backend(name, options)
    trials = plan(config, CPU)
    reasons = backend_reasons(trials, CPU, ())
    with pytest.raises(ConfigError) as caught:
        check_feasible(config, trials, CPU, [machine("a", 0)], reasons)
    assert reason in str(caught.value)


def some_unavailable(skip: bool) -> s.Config:
    config = copy.deepcopy(composed("+exp=quickstart"))
    config.measure = [s.Measure.a2a]
    config.against.backends = {"deepep": s.Backend("deepep"), "uccl": s.Backend("uccl")}
    config.against.skip_unavailable = skip
    return config


def test_backends_that_cannot_run_end_the_sweep_or_are_left_out():
    strict = some_unavailable(skip=False)
    trials = plan(strict, CPU)
    reasons = backend_reasons(trials, CPU, ())
    assert reasons["gloo"] == []
    assert any("deep_ep" in reason for reason in reasons["deepep"])
    with pytest.raises(ConfigError, match="backend deepep cannot run here: ") as caught:
        check_feasible(strict, trials, CPU, [machine("a", 0)], reasons)
    assert "skip_unavailable=true measures the others (gloo)" in str(caught.value)
    check_feasible(some_unavailable(skip=True), trials, CPU, [machine("a", 0)], reasons)


def test_backends_that_can_all_run_are_no_problem():
    config = composed("+exp=a2a_variants")
    trials = plan(config, CPU)
    reasons = backend_reasons(trials, CPU, ())
    assert reasons == {"gloo": [], "gloo_equal": [], "gloo_padded": []}
    check_feasible(config, trials, CPU, [machine("a", 0)], reasons)


def test_a_sweep_of_which_no_backend_can_run_is_refused():
    config = some_unavailable(skip=True)
    del config.against.backends["uccl"]
    config.backend = s.Backend("uccl")
    trials = plan(config, CPU)
    reasons = backend_reasons(trials, CPU, ())
    with pytest.raises(ConfigError, match="backend uccl cannot run here: "):
        check_feasible(config, trials, CPU, [machine("a", 0)], reasons)


def test_a_probe_sees_the_environment_of_the_transport(tmp_path, monkeypatch):
    plugin = tmp_path / "uccl" / "lib" / "libnccl-net-uccl.so"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    (tmp_path / "uccl" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    config = some_unavailable(skip=True)
    assert "NCCL_NET_PLUGIN is not set" in str(backend_reasons(plan(config, CPU), CPU, ()))
    config.transport.env = {"NCCL_NET_PLUGIN": plugin.name}
    assert "NCCL_NET_PLUGIN is" not in str(backend_reasons(plan(config, CPU), CPU, ()))


def test_a_routing_file_that_cannot_be_read_ends_the_sweep(tmp_path):
    config = copy.deepcopy(composed("+exp=quickstart"))
    config.measure = [s.Measure.a2a]
    config.workload.routing = [s.RoutingKind.file]
    config.workload.routing_file = str(tmp_path / "none.npy")
    with pytest.raises(ConfigError, match=r"workload\.routing_file=.*no such file"):
        check_feasible(config, plan(config, CPU), CPU, [machine("a", 0)], {})


def test_a_model_that_is_not_here_is_not_fetched():
    config = copy.deepcopy(composed("+exp=quickstart"))
    config.measure = [s.Measure.serving]
    config.model = s.Model(name="m", path="nobody/nothing-of-this-name")
    with pytest.raises(ConfigError, match=r"model\.path=nobody/nothing-of-this-name is neither a"):
        check_feasible(config, plan(config, CPU), CPU, [machine("a", 0)], {})


def test_every_load_client_needs_a_core_of_this_machine():
    here = usable()
    config = copy.deepcopy(composed("+exp=external_dp_rdma"))
    config.load.clients = here
    assert reasons(config, machine("a", 8, ib=8)) == []
    config.load.clients = here + 1
    assert reasons(config, machine("a", 8, ib=8)) == [
        f"asked: load.clients={here + 1}, a core for each; found: {here} cores here. Lower "
        "load.clients: clients that share a core are later than one alone"
    ]


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"),
    [("auto", 0, CPU), ("auto", 1, CUDA), ("cpu", 8, CPU), ("cuda", 0, CUDA)],
)
def test_the_device(asked, gpus, expected):
    config = copy.deepcopy(composed("+exp=quickstart"))
    config.cluster.device = s.DeviceKind[asked]
    assert resolve_device(config, [machine("a", 0), machine("b", gpus)]) is expected


def test_ranks_of_trials():
    trials = plan(composed("+exp=quickstart"), CPU)
    assert [ranks_of(trial) for trial in trials] == [2, 2, 4, 4, *[2] * 12]
    assert gpus_needed(trials) == 4
    assert gpus_needed([]) == 0


def test_ports_of_a_plan_are_those_of_its_engines_and_router():
    (config,) = compose_all(["+exp=quickstart"], multirun=False)
    ports = ports_of(config, plan(config, s.DeviceKind.cpu))
    assert {18000, 18001, 18900, 19400, 19500} <= set(ports)
    assert max(ports) < 32768
    (only_a2a,) = compose_all(["+exp=quickstart", "measure=[a2a]"], multirun=False)
    assert ports_of(only_a2a, plan(only_a2a, s.DeviceKind.cpu)) == []
