"""The plugin's collectives against a naive reference, over real gloo processes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp

from serving import vllm_cpu_plugin as plugin

WORLD = 3
SIZES = [[2, 0, 5], [1, 1, 1], [4, 3, 0]]


def rows(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers below 256, exact in bfloat16."""
    seed = torch.Generator().manual_seed(rank)
    return torch.randint(0, 64, (count, 4), generator=seed).to(dtype)


def run_rank(rank: int, store: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD
    )
    group = torch.distributed.group.WORLD
    me = SimpleNamespace(world_size=WORLD, rank_in_group=rank, device_group=group)
    for sizes in SIZES:
        check_gather(me, rank, sizes)
        check_scatter(me, rank, sizes)
    check_defaults(me, rank)
    torch.distributed.destroy_process_group()


def check_gather(me: SimpleNamespace, rank: int, sizes: list[int]) -> None:
    kinds = (torch.bfloat16, torch.float32, torch.int64)
    mine = [rows(rank, sizes[rank], dtype) for dtype in kinds]
    got = plugin.all_gatherv(me, mine, 0, sizes)
    for dtype, tensor in zip(kinds, got, strict=True):
        assert torch.equal(tensor, torch.cat([rows(r, n, dtype) for r, n in enumerate(sizes)]))


def check_scatter(me: SimpleNamespace, rank: int, sizes: list[int]) -> None:
    for dim, dtype in ((0, torch.bfloat16), (-1, torch.float32)):
        inputs = [rows(10 + r, sum(sizes), dtype) for r in range(WORLD)]
        inputs = [x if dim == 0 else x.t() for x in inputs]  # transposed: not contiguous
        before = inputs[rank].clone()
        got = plugin.reduce_scatterv(me, inputs[rank], dim, sizes)
        expected = torch.stack(inputs).sum(0).split(sizes, dim)[rank]
        assert torch.equal(got, expected)
        assert got.is_contiguous()
        assert torch.equal(inputs[rank], before)


def check_defaults(me: SimpleNamespace, rank: int) -> None:
    gathered = plugin.all_gatherv(me, rows(rank, 2, torch.float32))
    assert torch.equal(gathered, torch.cat([rows(r, 2, torch.float32) for r in range(WORLD)]))
    summed = plugin.reduce_scatterv(me, torch.ones(2 * WORLD, 4), 0)
    assert torch.equal(summed, torch.full((2, 4), float(WORLD)))


def test_collectives_match_the_reference(tmp_path: Path) -> None:
    mp.spawn(run_rank, (str(tmp_path / "store"),), nprocs=WORLD)  # type: ignore[no-untyped-call]


def test_wrong_sizes_are_refused_before_anything_is_sent() -> None:
    me = SimpleNamespace(world_size=2, rank_in_group=1, device_group=None)
    with pytest.raises(ValueError, match="rank 1 has 3 rows"):
        plugin.all_gatherv(me, torch.zeros(3, 2), 0, [3, 2])
    with pytest.raises(ValueError, match="5 rows do not split"):
        plugin.reduce_scatterv(me, torch.zeros(5, 2), 0, [3, 3])
    with pytest.raises(NotImplementedError, match="only 0"):
        plugin.all_gatherv(me, torch.zeros(3, 2), 1, [3, 2])


class TestRegister:
    """`register` fills what is missing on the CPU platform, and nothing else."""

    @pytest.fixture(autouse=True)
    def communicator(self, monkeypatch: pytest.MonkeyPatch) -> type:
        module = pytest.importorskip(
            "vllm.distributed.device_communicators.cpu_communicator", reason="needs vLLM"
        )
        fresh = type("CpuCommunicator", module.CpuCommunicator.__bases__, {})
        monkeypatch.setattr(module, "CpuCommunicator", fresh)
        self.communicator_class = fresh
        return fresh

    def platform(self, monkeypatch: pytest.MonkeyPatch, is_cpu: bool) -> None:
        from vllm.platforms import current_platform

        monkeypatch.setattr(current_platform, "is_cpu", lambda: is_cpu, raising=False)

    def test_adds_both_on_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.platform(monkeypatch, is_cpu=True)
        plugin.register()
        plugin.register()
        assert self.communicator_class.all_gatherv is plugin.all_gatherv  # type: ignore[attr-defined]
        assert self.communicator_class.reduce_scatterv is plugin.reduce_scatterv  # type: ignore[attr-defined]

    def test_leaves_other_platforms_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.platform(monkeypatch, is_cpu=False)
        plugin.register()
        assert not {"all_gatherv", "reduce_scatterv"} & set(vars(self.communicator_class))

    def test_leaves_methods_of_a_newer_vllm_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own = lambda self, input_, dim=0, sizes=None: input_  # noqa: E731
        self.communicator_class.all_gatherv = own  # type: ignore[attr-defined]
        self.platform(monkeypatch, is_cpu=True)
        plugin.register()
        assert vars(self.communicator_class)["all_gatherv"] is own
        assert vars(self.communicator_class)["reduce_scatterv"] is plugin.reduce_scatterv


HIDDEN, INTER, EXPERTS, TOPK, TOKENS = 64, 64, 4, 2, 9


def vllm_experts():
    """vLLM's own CPU experts, without an engine around them."""
    cpu_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    # vLLM picks the library for this processor; another one ends the process.
    platforms = pytest.importorskip("vllm.platforms")
    platforms.current_platform.import_kernels()
    experts = object.__new__(cpu_moe.CPUUnquantizedExperts)
    experts._use_zentorch = False
    experts.quant_config = SimpleNamespace(w1_bias=None, w2_bias=None)
    return experts, cpu_moe


def run_experts(apply, experts, pack, w13, w2, x, weights, ids, expert_map):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    output = torch.full_like(x, float("nan"))
    apply(
        experts, output, x, pack(w13, "vec"), pack(w2, "vec"), weights, ids, MoEActivation.SILU,
        EXPERTS, expert_map, None, None, x.new_empty(0), x.new_empty(0), None, False,
    )  # fmt: skip
    return output.float()


def test_experts_of_two_ranks_add_up_to_the_whole() -> None:
    experts, cpu_moe = vllm_experts()
    pack = cpu_moe.cpu_prepack_moe_weight
    mapped = cpu_moe.CPUUnquantizedExperts.apply
    if not plugin._reads(mapped, "expert_map"):
        mapped = plugin.with_local_experts(mapped)
    gen = torch.Generator().manual_seed(3)
    bf16 = torch.bfloat16
    w13 = torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=gen).to(bf16) / 8
    w2 = torch.randn(EXPERTS, HIDDEN, INTER, generator=gen).to(bf16) / 8
    x = torch.randn(TOKENS, HIDDEN, generator=gen).to(bf16)
    scores = torch.rand(TOKENS, EXPERTS, generator=gen)
    weights, ids = scores.topk(TOPK)
    call = (x, weights.float().contiguous(), ids.to(torch.int32).contiguous())

    whole = run_experts(mapped, experts, pack, w13, w2, *call, None)
    half = EXPERTS // 2
    parts = []
    for rank in (0, 1):
        mine = slice(rank * half, (rank + 1) * half)
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(half, dtype=torch.int32)
        parts.append(run_experts(mapped, experts, pack, w13[mine], w2[mine], *call, expert_map))
    assert torch.allclose(parts[0] + parts[1], whole, rtol=2**-6, atol=2**-6)
    assert not torch.allclose(parts[0], whole, rtol=2**-6, atol=2**-6)


def test_a_function_that_reads_its_argument_is_left_alone() -> None:
    def reads(a, expert_map):
        return expert_map

    def ignores(a, expert_map):
        return a

    assert plugin._reads(reads, "expert_map")
    assert not plugin._reads(ignores, "expert_map")
