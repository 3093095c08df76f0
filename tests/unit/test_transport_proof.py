"""Which transport is asked for, and what proves that it carried the traffic."""

from __future__ import annotations

import pytest

from ep_ray.config.schema import Transport, TransportKind
from ep_ray.transport import Evidence, evidence_in_log, judge, server_envs, transport_env

T = TransportKind
HOST = "node1:811:902 [0] NCCL INFO "

# Lines as NCCL 2.18 to 2.28 and its plugins write them.
CHANNELS = [
    ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "P2P/CUMEM", "p2p"),
    ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "P2P/CUMEM/read", "p2p"),
    ("Channel 03/0 : 1[1] -> 0[0] via P2P/IPC/read", "P2P/IPC/read", "p2p"),
    ("Channel 03/0 : 1[1] -> 0[0] via P2P/IPC", "P2P/IPC", "p2p"),
    ("Channel 01 : 0[1a000] -> 1[1b000] via P2P/direct pointer", "P2P/direct", "p2p"),
    ("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", "SHM/direct/direct", "shm"),
    ("Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0", "NET/Socket/0", "tcp"),
    ("Channel 00/0 : 1[1] -> 0[0] [receive] via NET/Socket/0/Shared", "NET/Socket/0/Shared", "tcp"),
    ("Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/3/GDRDMA", "NET/IB/3/GDRDMA", "ib"),
    ("Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0(3)/GDRDMA", "NET/IB/0(3)/GDRDMA", "ib"),
    ("Channel 00/0 : 0[0] -> 8[0] [send] via NET/IBext_v8/0", "NET/IBext_v8/0", "ib"),
    (
        "Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0/GDRDMA",
        "NET/Libfabric/0/GDRDMA",
        "efa",
    ),
    (
        "Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA",
        "NET/AWS Libfabric/0/GDRDMA",
        "efa",
    ),
    ("Channel 00/0 : 0[0] -> 8[0] [send] via NET/UCX/0", "NET/UCX/0", "NET/UCX"),
]


@pytest.mark.parametrize(("line", "channel", "kind"), CHANNELS)
def test_a_channel_line_shows_its_transport(line, channel, kind):
    assert evidence_in_log(3, [HOST + line]) == [Evidence(3, "log", f"via {channel}", kind)]


@pytest.mark.parametrize("network", ["Socket", "IB", "AWS Libfabric", "IBext_v8"])
def test_the_network_that_nccl_chose_is_noted_but_proves_nothing(network):
    found = evidence_in_log(0, [f"{HOST}Using network {network}"])
    assert found == [Evidence(0, "log", f"Using network {network}", None)]
    assert judge(T.tcp, found, local_links=False) == ("unproved", "")


@pytest.mark.parametrize(
    "line",
    [
        "NET/Socket : Using [0]eth0:10.0.0.1<0>",
        "NET/IB : No device found.",
        "NCCL_NET set by environment to Socket.",
        "Loaded net plugin Libfabric (v8)",
        "P2P is disabled between connected GPUs 1 and 0.",
        "Connected all rings, use ring PXN 0 GDR 1",
    ],
)
def test_lines_about_what_might_be_used_show_nothing(line):
    assert evidence_in_log(0, [HOST + line]) == []


def test_each_statement_counts_once():
    lines = [f"{HOST}Channel {i:02d}/0 : 0[0] -> 1[1] via P2P/CUMEM" for i in range(8)]
    lines += [f"{HOST}Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/{i}/GDRDMA" for i in (0, 1, 0)]
    texts = [e.evidence for e in evidence_in_log(0, lines)]
    assert texts == ["via P2P/CUMEM", "via NET/IB/0/GDRDMA", "via NET/IB/1/GDRDMA"]


def seen(*kinds: str | None) -> list[Evidence]:
    return [Evidence(rank, "log", "words", kind) for rank, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("asked", "kinds", "local_links", "verdict"),
    [
        (T.auto, ("tcp", "nvlink"), False, ("observed", "nvlink+tcp")),
        (T.auto, (), False, ("observed", "")),
        (T.tcp, (), True, ("unproved", "")),
        (T.tcp, (None,), True, ("unproved", "")),
        (T.tcp, ("tcp", "tcp"), False, ("proved", "tcp")),
        (T.tcp, ("tcp", "nvlink"), True, ("proved", "nvlink+tcp")),
        (T.ib, ("ib", "shm"), True, ("proved", "ib+shm")),
        (T.efa, ("efa", "nvlink", "shm"), True, ("proved", "efa+nvlink+shm")),
        (T.nvlink, ("nvlink",), True, ("proved", "nvlink")),
        (T.shm, ("shm",), False, ("proved", "shm")),
        # Peer-to-peer may be PCIe: it takes evidence of the links to prove NVLink.
        (T.nvlink, ("p2p",), False, ("unproved", "p2p")),
        (T.nvlink, ("p2p", "nvlink"), False, ("proved", "nvlink")),
        (T.ib, ("ib", "p2p"), True, ("proved", "ib+p2p")),
        (T.ib, ("ib", "p2p"), False, ("contradicted", "ib+p2p")),
        (T.ib, ("p2p",), True, ("contradicted", "p2p")),
        (T.shm, ("p2p",), False, ("contradicted", "p2p")),
        # Faster links between ranks that should talk over the network.
        (T.tcp, ("tcp", "nvlink"), False, ("contradicted", "nvlink+tcp")),
        (T.tcp, ("nvlink",), True, ("contradicted", "nvlink")),
        (T.ib, ("tcp", "nvlink"), True, ("contradicted", "nvlink+tcp")),
        (T.ib, ("ib", "tcp"), True, ("contradicted", "ib+tcp")),
        (T.nvlink, ("nvlink", "shm"), True, ("contradicted", "nvlink+shm")),
        (T.ib, ("NET/UCX",), True, ("contradicted", "NET/UCX")),
    ],
)
def test_the_verdict(asked, kinds, local_links, verdict):
    assert judge(asked, seen(*kinds), local_links) == verdict


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (T.auto, {}),
        (T.nvlink, {"NCCL_P2P_LEVEL": "NVL"}),
        (T.shm, {"NCCL_P2P_DISABLE": "1"}),
        (
            T.tcp,
            {
                "NCCL_NET": "Socket",
                "NCCL_IB_DISABLE": "1",
                "NCCL_HOSTID": "g",
                "NCCL_MNNVL_ENABLE": "0",
            },
        ),
        (
            T.ib,
            {
                "NCCL_NET": "IB",
                "NCCL_IB_DISABLE": "0",
                "NCCL_HOSTID": "g",
                "NCCL_MNNVL_ENABLE": "0",
            },
        ),
        (T.efa, {"FI_PROVIDER": "efa", "NCCL_HOSTID": "g", "NCCL_MNNVL_ENABLE": "0"}),
    ],
)
def test_the_environment_that_asks_for_a_transport(kind, expected):
    always = {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
    assert transport_env(Transport(kind), "g", one_node=False) == always | expected


@pytest.mark.parametrize("kind", list(T))
def test_servers_on_one_machine_are_hosts_of_their_own_where_a_network_is_asked_for(kind):
    hosts = [env.get("NCCL_HOSTID") for env in server_envs(Transport(kind), 4, one_node=True)]
    network = kind in (T.tcp, T.ib, T.efa)
    assert len(set(hosts)) == (4 if network else 1)
    assert (None in hosts) != network


def test_one_machine_stays_on_loopback_unless_an_interface_is_named():
    assert transport_env(Transport(), "g", one_node=True)["GLOO_SOCKET_IFNAME"] == "lo"
    named = transport_env(Transport(interface="eth1"), "g", one_node=True)
    assert (named["GLOO_SOCKET_IFNAME"], named["NCCL_SOCKET_IFNAME"]) == ("eth1", "eth1")


def test_the_users_variables_win():
    asked = Transport(T.tcp, env={"NCCL_NET": "Mine", "NCCL_NVLS_ENABLE": "1"})
    env = transport_env(asked, "g", one_node=False)
    assert (env["NCCL_NET"], env["NCCL_NVLS_ENABLE"], env["NCCL_IB_DISABLE"]) == ("Mine", "1", "1")
