"""The port map: overlaps, ranges, and ports that are really taken."""

import socket
from pathlib import Path

import pytest

from ep_ray.config.schema import Arm, ArmKind
from serving import ports
from serving.ports import Claim

EPHEMERAL = (32768, 60999)
ONE_NODE = ["10.0.0.1"] * 4


def arm(**changes: object) -> Arm:
    return Arm(name="a", kind=ArmKind.external_dp, dp=4, **changes)  # type: ignore[arg-type]


def test_default_map_has_no_problem() -> None:
    claims = ports.port_map(arm(), ONE_NODE, ports.router_claims("10.0.0.1", 18900, {"random"}))
    assert ports.map_problems(claims, EPHEMERAL, (20000, 20999)) == []


def test_ranks_of_one_node_probe_disjoint_windows() -> None:
    bases = [ports.probe_base(19500, ONE_NODE, rank) for rank in range(4)]
    assert bases == [19500, 19530, 19560, 19590]


def test_ranks_on_separate_nodes_probe_the_published_port() -> None:
    nodes = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert [ports.probe_base(19500, nodes, rank) for rank in range(3)] == [19500, 19500, 19530]


@pytest.mark.parametrize(
    ("changes", "override", "words"),
    [
        ({"api_port": 40000}, "arm.api_port=", "ephemeral"),
        ({"api_port": 19397}, "arm.api_port=", "overlaps"),
        ({"vllm_port": 19950}, "arm.vllm_port=", "Ray's workers"),
        ({"rpc_port": 80}, "arm.rpc_port=", "outside"),
        ({"api_port": 18899}, "router.port=", "overlaps"),
        ({"vllm_port": 32750}, "arm.vllm_port=", "ephemeral"),
    ],
)
def test_problem_names_who_and_how_to_move(
    changes: dict[str, int], override: str, words: str
) -> None:
    claims = ports.port_map(
        arm(**changes), ONE_NODE, ports.router_claims("10.0.0.1", 18900, {"random"})
    )
    problems = ports.map_problems(claims, EPHEMERAL, (20000, 20999))
    assert any(override in p and words in p for p in problems), problems
    with pytest.raises(ports.PortError, match=words):
        ports.check_map(claims, EPHEMERAL, (20000, 20999))


def test_same_port_on_two_nodes_is_no_overlap() -> None:
    claims = [Claim(ip, 19000, 1, "x", "y=") for ip in ("10.0.0.1", "10.0.0.2")]
    assert ports.map_problems(claims, EPHEMERAL) == []


def test_single_engine_needs_no_rpc_port() -> None:
    assert not any("rpc" in claim.override for claim in ports.port_map(arm(), ["10.0.0.1"]))


def test_kernel_range_is_read() -> None:
    first, last = ports.ephemeral_range()
    assert 1 <= first < last <= 65535


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_taken_port_is_named(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        taken = Claim("127.0.0.1", port, 1, "API server of rank 0", "arm.api_port=")
        with pytest.raises(ports.PortError, match=rf"rank 0 \(port {port} .*arm.api_port="):
            ports.check_free([taken])
        window = Claim("127.0.0.1", port, 1, "window", "arm.vllm_port=", probed=True)
        ports.check_free([window])
        assert ports.wait_free([port], 0.1) == [port]
    assert ports.wait_free([port], 10.0) == []


def test_sockets_that_listen_on_a_port_are_counted() -> None:
    """All of them where they share it, of whatever process; other ports and states are none."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as one:
        port = one.getsockname()[1]
        assert ports.listeners(port) == 1
        with (
            socket.create_server(("127.0.0.1", port), reuse_port=True),
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            assert ports.listeners(port) == 2
            assert ports.listeners(client.getsockname()[1]) == 0
    assert ports.listeners(port) == 0


def test_listeners_of_both_families_count_and_an_absent_table_has_none(tmp_path: Path) -> None:
    head = "  sl  local_address rem_address   st"
    (tmp_path / "tcp").write_text(f"{head}\n0: 0100007F:49D4 0 0A\n1: 0100007F:49D4 0 01\n")
    (tmp_path / "tcp6").write_text(f"{head}\n0: {'0' * 32}:49D4 0 0A\n1: {'0' * 32}:49D5 0 0A\n")
    tables = [tmp_path / name for name in ("tcp", "tcp6", "absent")]
    assert ports.listeners(18900, tables) == 2
    assert ports.listeners(18902, tables) == 0
