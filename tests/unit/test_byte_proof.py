"""Byte counters and GPU links as evidence beside NCCL's log, and the verdict with them."""

from __future__ import annotations

from ep_ray.config.schema import TransportKind
from ep_ray.proof import counter_evidence, link_evidence
from ep_ray.transport import COUNTERS, LOG, Evidence, evidence_in_log, judge

NVLINK, TCP, IB = TransportKind.nvlink, TransportKind.tcp, TransportKind.ib
P2P = "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
SOCKET = "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0"
SHARED = "Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"


def log(*lines: str) -> list[Evidence]:
    return evidence_in_log(0, [f"h:1:2 [0] NCCL INFO {line}" for line in lines])


def test_nvlink_needs_evidence_of_the_links() -> None:
    seen = log(P2P)
    assert link_evidence(seen, [{}, {}], linked=False) == []
    assert link_evidence(seen, [{"NCCL_P2P_LEVEL": "NVL"}, {}], linked=False) == []
    assert link_evidence(log(SHARED), [{"NCCL_P2P_LEVEL": "NVL"}], linked=True) == []
    for proof in (
        link_evidence(seen, [], linked=True),
        link_evidence(seen, [{"NCCL_P2P_LEVEL": "NVL"}] * 2, linked=False),
    ):
        assert judge(NVLINK, seen + proof, False) == ("proved", "nvlink")


def counted(asked: TransportKind, expected: int | None, **grown: int) -> list[Evidence]:
    names = {
        "lo": "net/lo/rx_bytes",
        "mlx": "ib/mlx5_0-1/rx_bytes",
        "nv": "nvlink/gpu0/rx_bytes",
    }
    counters = {names[k]: v for k, v in grown.items()}
    return counter_evidence(asked, {"10.0.0.1": counters}, expected, "HTTP")


def test_covered_bytes_prove_tcp() -> None:
    found = counted(TCP, 1000, lo=1000)
    assert [(e.transport, e.bytes_seen, e.bytes_expected) for e in found] == [("tcp", 1000, 1000)]
    assert "HTTP" in found[0].evidence
    assert judge(TCP, found, False) == ("proved", "tcp")


def test_too_few_bytes_leave_tcp_unproved_even_if_the_log_names_it() -> None:
    found = counted(TCP, 1000, lo=999)
    assert judge(TCP, found, False)[0] == "unproved"
    assert judge(TCP, log(SOCKET) + found, False)[0] == "unproved"


def test_without_an_expectation_counters_say_nothing() -> None:
    assert counted(TCP, None, lo=10**9) == []
    assert counted(TCP, 0, lo=10**9) == []
    assert judge(TCP, [], False)[0] == "unproved"


def test_bytes_on_other_ports_contradict() -> None:
    found = counted(TCP, 1000, lo=10, mlx=5000)
    assert judge(TCP, found, False) == ("contradicted", "ib")
    assert judge(IB, counted(IB, 1000, mlx=10, nv=5000), False)[0] == "contradicted"


def test_network_interfaces_never_contradict() -> None:
    # HTTP and Ray use them in any case.
    found = counted(IB, 1000, lo=10**9, mlx=10)
    assert judge(IB, found, False)[0] == "unproved"
    assert judge(IB, counted(IB, 1000, lo=10**9, mlx=1000), False) == ("proved", "ib")


def test_nvlink_counters_prove_without_a_log() -> None:
    assert judge(NVLINK, counted(NVLINK, 1000, lo=5, nv=2000), False) == ("proved", "nvlink")


def test_machines_are_added_up_and_listed() -> None:
    grown = {"a": {"net/eth0/rx_bytes": 600}, "b": {"net/eth0/rx_bytes": 500}}
    total, *each = counter_evidence(TCP, grown, 1100, "")
    assert (total.transport, total.bytes_seen) == ("tcp", 1100)
    assert [(e.transport, e.bytes_seen, e.bytes_expected) for e in each] == [
        (None, 600, None),
        (None, 500, None),
    ]
    assert all(e.source == COUNTERS != LOG for e in (total, *each))
    assert judge(TCP, [total, *each], False)[0] == "proved"
