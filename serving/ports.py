"""The port map of a group of engines, and the checks that keep it free of races.

| port                               | who                                     | set by           |
|------------------------------------|-----------------------------------------|------------------|
| `api_port + rank`                  | API server of each rank                 | `arm.api_port=`  |
| `rpc_port`, on rank 0's node       | vLLM's data-parallel handshake          | `arm.rpc_port=`  |
| `vllm_port + 30 * local`, 30 ports | where that rank's vLLM probes for ports | `arm.vllm_port=` |
| `router.port`                      | the router                              | `router.port=`   |
| `router.port + 1`, `+ 2`           | vllm-router and its metrics             | `router.port=`   |

`local` counts the ranks on one node. vLLM binds a probed port, closes it, tells its peers, and
binds it again later; two ranks that probe the same range at the same time can take each other's
port in between. So each rank probes a window of its own, below the kernel's ephemeral range.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROBE_WINDOW = 30
NO_ROUTER, VLLM_ROUTER = "none", "vllm_router"
_LISTENING = "0A"  # a state of TCP in the kernel's tables
_SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
EPHEMERAL_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortError(RuntimeError):
    """The port map cannot work here; the message names who needs which port and how to move it."""


@dataclass(frozen=True)
class Claim:
    """Ports `first` to `first + count - 1` of one node.

    Attributes:
        node_ip: The node whose ports these are.
        who: Who needs them, in words.
        override: The setting that moves them.
        probed: vLLM looks for free ports among them, so single busy ones do no harm.
    """

    node_ip: str
    first: int
    count: int
    who: str
    override: str
    probed: bool = False

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    def overlaps(self, first: int, last: int) -> bool:
        return self.first <= last and first <= self.last

    def __str__(self) -> str:
        span = f"{self.first}" if self.count == 1 else f"{self.first}-{self.last}"
        return f"{self.who} (port {span} on {self.node_ip}, moved by {self.override})"


def probe_base(vllm_port: int, node_ips: Sequence[str], rank: int) -> int:
    """First port of the window in which this rank's vLLM probes (its `VLLM_PORT`)."""
    return vllm_port + PROBE_WINDOW * list(node_ips[:rank]).count(node_ips[rank])


def rank_claims(arm: Any, node_ips: Sequence[str], rank: int) -> list[Claim]:
    """What one rank of an arm needs. `node_ips` holds one address per rank."""
    node, name = node_ips[rank], f"rank {rank} of arm {arm.name}"
    claims = [
        Claim(node, arm.api_port + rank, 1, f"API server of {name}", "arm.api_port="),
        Claim(node, probe_base(arm.vllm_port, node_ips, rank), PROBE_WINDOW,
              f"VLLM_PORT window of {name}", "arm.vllm_port=", probed=True),
    ]  # fmt: skip
    if rank == 0 and len(node_ips) > 1:
        claims.append(Claim(node, arm.rpc_port, 1, f"RPC of arm {arm.name}", "arm.rpc_port="))
    return claims


def router_claims(node_ip: str, port: int, policies: Collection[str]) -> list[Claim]:
    """What the routers of these policies need, all up at once; `none` needs nothing.

    Args:
        node_ip: The node that they run on.
        port: `router.port`.
        policies: Names of policies.
    """
    needs = []
    if set(policies) - {NO_ROUTER, VLLM_ROUTER}:
        needs.append((port, "the router"))
    if VLLM_ROUTER in policies:
        needs += [(port + 1, "vllm-router"), (port + 2, "metrics of vllm-router")]
    return [Claim(node_ip, first, 1, who, "router.port=") for first, who in needs]


def port_map(arm: Any, node_ips: Sequence[str], routers: Sequence[Claim] = ()) -> list[Claim]:
    """Everything that an arm needs, and what its routers do (`router_claims`)."""
    claims = [claim for rank in range(len(node_ips)) for claim in rank_claims(arm, node_ips, rank)]
    return [*claims, *routers]


def ephemeral_range() -> tuple[int, int]:
    """The ports that the kernel hands out for outgoing connections, first and last."""
    first, last = EPHEMERAL_FILE.read_text().split()
    return int(first), int(last)


def map_problems(
    claims: Sequence[Claim],
    ephemeral: tuple[int, int],
    ray_workers: tuple[int, int] | None = None,
) -> list[str]:
    """What is wrong with a port map, in words; empty when it can work. Pure.

    Args:
        claims: The map.
        ephemeral: `ephemeral_range()`.
        ray_workers: `cluster.min_worker_port` and `max_worker_port`, where known.
    """
    problems = []
    for claim in claims:
        if not 1024 <= claim.first <= claim.last <= 65535:
            problems.append(f"{claim} is outside 1024-65535")
        elif claim.overlaps(*ephemeral):
            problems.append(
                f"{claim} lies in the kernel's ephemeral range {_span(ephemeral)}: "
                "any connection may take it"
            )
        if ray_workers and claim.overlaps(*ray_workers):
            problems.append(
                f"{claim} lies in the range of Ray's workers {_span(ray_workers)}: "
                "move it, or cluster.min_worker_port= and cluster.max_worker_port="
            )
    for one, other in itertools.combinations(claims, 2):
        if one.node_ip == other.node_ip and one.overlaps(other.first, other.last):
            problems.append(f"{one} overlaps {other}")
    return problems


def _span(ports: tuple[int, int]) -> str:
    return f"{ports[0]}-{ports[1]}"


def check_map(
    claims: Sequence[Claim],
    ephemeral: tuple[int, int],
    ray_workers: tuple[int, int] | None = None,
) -> None:
    """Raises PortError with every problem of the map."""
    problems = map_problems(claims, ephemeral, ray_workers)
    if problems:
        raise PortError("the port map cannot work:\n  " + "\n  ".join(problems))


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of this machine now, on any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT does not count
        try:
            probe.bind(("", port))
            probe.listen(1)  # another listener on one address shows only here
        except OSError:
            return False
    return True


def listeners(port: int, tables: Sequence[Path] = _SOCKET_TABLES) -> int:
    """Sockets of this machine that listen on a port, on any address and in any process.

    Args:
        port: Several may share it (`SO_REUSEPORT`).
        tables: The kernel's tables of TCP sockets; without IPv6 one is absent.
    """
    lines = [line.split() for t in tables if t.exists() for line in t.read_text().splitlines()[1:]]
    return sum(line[3] == _LISTENING and line[1].endswith(f":{port:04X}") for line in lines)


def check_free(claims: Iterable[Claim]) -> None:
    """Raises PortError if a port of this node is taken. To be called on the claims' node."""
    busy = [claim for claim in claims if not claim.probed and not is_free(claim.first)]
    if busy:
        taken = "\n  ".join(str(claim) for claim in busy)
        raise PortError(f"these ports are taken; end what holds them, or move them:\n  {taken}")


def wait_free(ports: Iterable[int], timeout_s: float) -> list[int]:
    """Waits until all ports of this machine are free. Returns those still taken at the end."""
    deadline = time.monotonic() + timeout_s
    busy = [port for port in ports if not is_free(port)]
    while busy and time.monotonic() < deadline:
        time.sleep(0.05)
        busy = [port for port in busy if not is_free(port)]
    return busy
