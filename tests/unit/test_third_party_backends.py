from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from ep_ray.a2a.bench import Procedure, draw_pool
from ep_ray.a2a.check import check, payload
from ep_ray.a2a.routing import Routing
from ep_ray.backends import registry
from ep_ray.backends.base import Received, Spec
from ep_ray.backends.layouts import expert_sums, local_only, to_global
from ep_ray.config.schema import Dtype, RoutingKind

CONF = Path(__file__).parents[2] / "conf" / "backend"
LIBRARIES = {
    "uccl": "uccl",
    "flashinfer": "flashinfer",
    "nccl_ep": "nccl",
    "deepep": "deep_ep",
    "deepep_v2": "deep_ep",
    "uccl_ep": "uccl",
    "nixl_ep": "nixl_ep_cu13",
    "pplx_garden": "pplx_garden",
}
ABSENT = [name for name, package in LIBRARIES.items() if find_spec(package) is None]
LOW_LATENCY = [("deepep", {}), ("uccl_ep", {}), ("nixl_ep", {})]


def spec(**changes: Any) -> Spec:
    base = {"ep": 4, "tokens": 8, "hidden": 7168, "experts": 32, "topk": 8, "device": "cuda"}
    return Spec(**(base | changes))


def fakes() -> Any:
    path = Path(__file__).parent / "library_fakes.py"
    made = spec_from_file_location("library_fakes", path)
    assert made is not None
    assert made.loader is not None
    module = module_from_spec(made)
    sys.modules["library_fakes"] = module  # dataclasses look themselves up
    made.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = fakes()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("ep_ray.backends.nccl_ep._stream", lambda: 0)
    for variable in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NVSHMEM_QP_DEPTH"):
        monkeypatch.setenv(variable, "restored afterwards")
    return made


# --- without the libraries -------------------------------------------------------------------


@pytest.fixture(scope="module")
def probed() -> dict[str, Any]:
    """Reasons of every absent library, and what asking for them imported; in a fresh process."""
    code = (
        "import json, sys, torch; before = set(sys.modules);"
        "from ep_ray.backends.registry import load;"
        f"reasons = {{name: load(name).probe({{}}) for name in {ABSENT}}};"
        "new = sorted(set(sys.modules) - before);"
        "print(json.dumps([reasons, new, torch.cuda.is_initialized()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True
    )
    reasons, modules, initialised = json.loads(done.stdout)
    return {"reasons": reasons, "modules": set(modules), "cuda": initialised}


@pytest.mark.parametrize("name", ABSENT)
def test_an_absent_library_is_named_with_the_way_to_get_it(
    name: str, probed: dict[str, Any]
) -> None:
    first = [r for r in probed["reasons"][name] if f"no package '{LIBRARIES[name]}" in r]
    assert first, probed["reasons"][name]
    assert "pip install" in first[0] or "from source" in first[0]


def test_probing_imports_no_library_and_starts_no_cuda(probed: dict[str, Any]) -> None:
    tops = {name.partition(".")[0] for name in probed["modules"]}
    assert not tops & {"cuda", "pynvml", "tvm_ffi", *LIBRARIES.values()}
    assert not probed["cuda"]


def test_pplx_names_every_device_that_it_misses(probed: dict[str, Any]) -> None:
    if "pplx_garden" not in ABSENT:
        pytest.skip("pplx_garden is installed")
    reasons = "; ".join(probed["reasons"]["pplx_garden"])
    if not Path("/sys/class/infiniband").exists():
        assert "RDMA network card" in reasons
    if not Path("/dev/gdrdrv").exists():
        assert "GDRCopy" in reasons


def test_a_namesake_package_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "deep_ep"
    package.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    (package / "__init__.py").write_text("from uccl.ep import Config\n")
    assert any("use uccl_ep" in r for r in registry.load("deepep").probe({}))
    assert not any("not UCCL's wrapper" in r for r in registry.load("uccl_ep").probe({}))
    (package / "__init__.py").write_text("")
    (package / "_C.cpython.so").touch()
    assert not any("use uccl_ep" in r for r in registry.load("deepep").probe({}))
    assert any("not UCCL's wrapper" in r for r in registry.load("uccl_ep").probe({}))


def test_nixl_binaries_must_be_for_this_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "nixl_ep_cu13"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nixl_ep_cpp_torch15.cpython-312.so").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert any("binaries for torch15, this is" in r for r in registry.load("nixl_ep").probe({}))
    mine = "".join(torch.__version__.split(".")[:2])
    (package / f"nixl_ep_cpp_torch{mine}.cpython-312.so").touch()
    assert not any("binaries" in r for r in registry.load("nixl_ep").probe({}))


def test_uccl_wants_its_plugin_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "uccl" / "lib" / "libnccl-net-uccl.so"
    plugin.parent.mkdir(parents=True)
    (tmp_path / "uccl" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))

    def reasons(**env: str) -> str:
        return "; ".join(registry.load("uccl").probe(env))

    assert "has no lib/libnccl-net" in reasons()
    plugin.touch()
    assert f"transport.env.NCCL_NET_PLUGIN={plugin}" in reasons()
    assert "NCCL_NET_PLUGIN" not in reasons(NCCL_NET_PLUGIN=str(plugin))
    assert "NCCL_NET_PLUGIN" not in reasons(NCCL_NET_PLUGIN=plugin.name)


# --- registry, options, capabilities ---------------------------------------------------------


def test_every_backend_has_a_state_a_version_and_a_config() -> None:
    table = registry.status_table()
    assert [line.backend for line in table] == list(registry.ADAPTERS) == list(registry.STATUS)
    assert all(line.written_against for line in table)
    named = [yaml.safe_load(path.read_text())["name"] for path in CONF.glob("*.yaml")]
    assert set(named) == {"auto", *registry.ADAPTERS}


def test_help_and_readme_say_how_far_each_backend_was_run() -> None:
    root = CONF.parents[1]
    help_text = (CONF.parent / "hydra" / "help" / "ep_ray.yaml").read_text()
    readme = (root / "README.md").read_text()
    for state in registry.State:
        names = [n for n, (found, _) in registry.STATUS.items() if found is state]
        assert f"\n    {state.value}: {', '.join(names)}\n" in help_text
    for line in registry.status_table():
        assert f"| `{line.backend}` | {line.state.value} | {line.written_against} |" in readme


@pytest.mark.parametrize("name", registry.ADAPTERS)
def test_configs_spell_out_options_that_the_adapter_knows(name: str) -> None:
    config = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert config["name"] == name
    registry.load(name, config.get("options"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("flashinfer", {"split": True}, r"\['split'\] are unknown to flashinfer; it knows none"),
        ("deepep", {"mode": "fast"}, "one of .*normal.*low_latency"),
        ("deepep", {"mode": "normal", "split": True}, "needs `mode: low_latency`"),
        ("nccl_ep", {"split": 1}, "expected a bool such as False"),
        ("pplx_garden", {"nets_per_gpu": "2"}, "expected a int such as 1"),
    ],
)
def test_options_are_checked_by_name_and_type(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        registry.load(name, options)


@pytest.mark.parametrize(
    ("name", "options", "change", "reason"),
    [
        ("deepep", {}, {"hidden": 1024}, "hidden 1024: it runs at [2048,"),
        ("deepep", {}, {"topk": 12}, "topk 12: it runs at"),
        ("deepep", {"mode": "normal"}, {"ep": 1}, "EP1: it runs at [2, 4, 8,"),
        ("uccl_ep", {}, {"topk": 10}, "topk 10: it runs at"),
        ("nixl_ep", {}, {"hidden": 512}, "hidden 512: it runs at"),
        ("flashinfer", {}, {"topk": 3}, "topk 3: it runs at [1, 2, 4, 6, 8, 10, 16, 22]"),
        ("nccl_ep", {}, {"hidden": 640}, "hidden 640: it runs at [512, 1024,"),
        ("nccl_ep", {}, {"ep": 16, "experts": 16, "device": "cpu"}, "device cpu: it runs on cuda"),
        ("pplx_garden", {}, {"combine_dtype": Dtype.fp8}, "combine in fp8: it carries bf16"),
    ],
)
def test_refusals(name: str, options: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    can = registry.load(name, options).capabilities
    found = can.refusals(spec(**change))
    assert len(found) == 1
    assert reason in found[0]
    assert can.refusals(spec()) == []


# --- bytes -----------------------------------------------------------------------------------

ROW = 7168 + 4 * 56
BYTES = [
    # dedup, bytes of a dispatched and of a combined row, bytes per pair in each direction
    *[(name, opt, "none", 16 + ROW, 14336, 4 * 8, 4 * 8) for name, opt in LOW_LATENCY],
    ("flashinfer", {}, "rank", ROW + 64, 14336, 8, 4),
    ("nccl_ep", {}, "rank", ROW + 80, 14336, 4 * 8, 4 * 8),
    ("deepep", {"mode": "normal"}, "rank", ROW + 96 + 4, 14336 + 4, 4 * 9, 0),
    ("deepep_v2", {}, "rank", 7168 + 224 + 128, 14336 + 64, 0, 0),
    ("pplx_garden", {}, "none", ROW + 16, 14336, 4 * 32, 0),
]


def drawn(ranks: int, masked: bool) -> Any:
    rng = np.random.default_rng(3)
    idx = rng.permuted(np.tile(np.arange(32), (ranks, 8, 1)), axis=2)[:, :, :8]
    return np.where(rng.random(idx.shape) < 0.2, -1, idx) if masked else idx


@pytest.mark.parametrize(("name", "options", "dedup", "row", "back", "pair", "pair_back"), BYTES)
def test_wire_bytes_are_those_of_a_count_by_hand(
    name: str, options: dict[str, Any], dedup: str, row: int, back: int, pair: int, pair_back: int
) -> None:
    backend: Any = registry.load(name, options)
    backend.spec, backend.node = spec(), 4
    topk = drawn(4, masked=True)
    dispatch, combine = np.zeros((4, 4), int), np.zeros((4, 4), int)
    for source, tokens in enumerate(topk):
        for choices in tokens:
            ranks = [int(e) // 8 for e in choices if e >= 0]
            for to in ranks if dedup == "none" else set(ranks):
                dispatch[source, to] += row
                combine[to, source] += back
    apart = 1 - np.eye(4, dtype=int)
    found = backend.wire_bytes(topk)
    assert found.dispatch.tolist() == ((dispatch + pair) * apart).tolist()
    assert found.combine.tolist() == ((combine + pair_back) * apart).tolist()


@pytest.mark.parametrize(
    ("name", "options", "row", "back", "pair"),
    [
        ("deepep", {"mode": "normal"}, 7472, 14352, 36),  # 7392 + 8 + 64 and 14336 + 8, to 16
        ("deepep_v2", {}, 7168 + 224 + 128, 14336 + 64, 0),
    ],
)
def test_between_nodes_a_row_crosses_once_and_is_handed_on(
    name: str, options: dict[str, Any], row: int, back: int, pair: int
) -> None:
    backend: Any = registry.load(name, options)
    backend.spec, backend.node = spec(), 2
    topk = drawn(4, masked=False)
    rows = np.zeros((4, 4), int)
    for source, tokens in enumerate(topk):
        for choices in tokens:
            ranks = {int(e) // 8 for e in choices}
            for node in {rank // 2 for rank in ranks}:
                relay = node * 2 + source % 2
                rows[source, relay] += 1
                for to in ranks & {2 * node, 2 * node + 1}:
                    rows[relay, to] += 1
    apart = 1 - np.eye(4, dtype=int)
    found = backend.wire_bytes(topk)
    assert found.dispatch.tolist() == ((rows * row + pair) * apart).tolist()
    assert found.combine.tolist() == (rows.T * back * apart).tolist()


# --- the adapters' own work, with stand-ins for the libraries --------------------------------

ADAPTERS = [
    ("deepep", {"mode": "low_latency"}),
    ("deepep", {"mode": "low_latency", "split": True}),
    ("deepep", {"mode": "normal"}),
    ("deepep_v2", {}),
    ("deepep_v2", {"cpu_sync": False}),
    ("uccl_ep", {}),
    ("nixl_ep", {"split": True}),
    ("flashinfer", {}),
    ("nccl_ep", {}),
    ("nccl_ep", {"split": True}),
    ("pplx_garden", {}),
]
SMALL = {"ep": 1, "tokens": 6, "hidden": 2048, "experts": 16, "topk": 4}
CPU = torch.device("cpu", 0)


def ready(name: str, options: dict[str, Any], group: Any, asked: Spec) -> Any:
    backend: Any = registry.load(name, options)
    # The stand-ins are for one rank, for which `deepep` has no tuned configuration.
    backend.capabilities = replace(backend.capabilities, ep_sizes=None)
    backend.setup(asked, group, CPU)
    return backend


def pool(asked: Spec) -> list[Routing]:
    return draw_pool(asked, Procedure(iterations=1, routing=RoutingKind.uniform), 0)


@pytest.mark.parametrize("dtype", [Dtype.fp8, Dtype.bf16])
@pytest.mark.parametrize(("name", "options"), ADAPTERS)
def test_adapters_pass_the_correctness_check_on_their_librarys_layout(
    name: str, options: dict[str, Any], dtype: Dtype, library: Any, group: Any
) -> None:
    asked = spec(**SMALL, dispatch_dtype=dtype)
    backend = ready(name, options, group, asked)
    assert check(backend, asked, group, CPU, pool(asked)) == []
    backend.destroy()


@pytest.mark.parametrize(("name", "options"), ADAPTERS)
def test_a_dispatch_timed_alone_leaves_the_next_step_right(
    name: str, options: dict[str, Any], library: Any, group: Any
) -> None:
    asked = spec(**SMALL)
    backend = ready(name, options, group, asked)
    rows = payload(backend, asked, torch.ones(asked.tokens, asked.hidden))
    for routing in pool(asked)[:2]:
        backend.plan(routing.topk_idx, routing.weights)
        backend.dispatch_send(rows)
        backend.dispatch_recv()
    assert check(backend, asked, group, CPU, pool(asked)) == []


def test_the_check_sees_a_library_that_sends_a_wrong_row(
    library: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec(**SMALL)
    for name, cls, where in (
        ("flashinfer", library.MoeAlltoAll, lambda got: got[0][0]),
        ("deepep", library.DeepEpBuffer, lambda got: got[0][0][0]),
    ):
        method = "dispatch" if name == "flashinfer" else "low_latency_dispatch"
        real = getattr(cls, method)

        def wrong(*args: Any, real: Any = real, where: Any = where, **named: Any) -> Any:
            got = real(*args, **named)
            where(got)[0] = where(got)[0].roll(1)
            return got

        with monkeypatch.context() as patched:
            patched.setattr(cls, method, wrong)
            backend = ready(name, {}, group, asked)
            assert any(
                "differ from what was sent" in f
                for f in check(backend, asked, group, CPU, pool(asked))
            )


def test_libraries_without_masks_refuse_them(library: Any, group: Any) -> None:
    asked = spec(**SMALL)
    routing = pool(asked)[0]
    routing.topk_idx[0, 0] = -1
    for name in ("flashinfer", "pplx_garden"):
        backend = ready(name, {}, group, asked)
        with pytest.raises(ValueError, match="no way to mask"):
            backend.plan(routing.topk_idx, routing.weights)


def test_nixl_stops_when_the_library_has_masked_a_rank(library: Any, group: Any) -> None:
    asked = spec(**SMALL)
    backend = ready("nixl_ep", {}, group, asked)
    routing = pool(asked)[0]
    backend.plan(routing.topk_idx, routing.weights)
    backend._buffer.masked = 1
    with pytest.raises(RuntimeError, match=r"masked ranks \[0\]"):
        backend.plan(routing.topk_idx, routing.weights)


def test_uccl_ep_is_told_the_device_and_the_ranks_of_the_host(library: Any, group: Any) -> None:
    ready("uccl_ep", {}, group, spec(**SMALL))
    assert os.environ["LOCAL_RANK"] == "0"
    assert os.environ["LOCAL_WORLD_SIZE"] == "1"


def test_nvshmem_queues_are_deep_enough_for_prefill(library: Any, group: Any) -> None:
    ready("deepep", {}, group, spec(**SMALL | {"tokens": 600}))
    assert os.environ["NVSHMEM_QP_DEPTH"] == "2048"


# --- helpers ---------------------------------------------------------------------------------


def test_expert_numbers_of_another_rank_are_dropped_and_local_ones_made_global() -> None:
    asked = spec(ep=4, experts=32)
    topk = torch.tensor([[8, 15, 16], [-1, 7, 9]], dtype=torch.int32)
    assert local_only(topk, 1, asked).tolist() == [[8, 15, -1], [-1, -1, 9]]
    assert to_global(torch.tensor([[0, 7, -1]]), 1, asked).tolist() == [[8, 15, -1]]


def test_expert_sums_weigh_only_where_weights_travelled() -> None:
    rows = torch.ones(1, 2)
    topk = torch.tensor([[0, -1, 2]])
    factors = torch.tensor([2.0, 5.0, 7.0])
    weights = torch.tensor([[0.5, 100.0, 0.25]])
    assert expert_sums(Received(rows, topk, weights), factors).tolist() == [[2.75, 2.75]]
    assert expert_sums(Received(rows, topk, None), factors).tolist() == [[9.0, 9.0]]
