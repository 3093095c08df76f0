"""Addresses at which ranks, engines and stores are reached."""

from __future__ import annotations

import ray

LOOPBACK = "127.0.0.1"


def is_one_node() -> bool:
    """Whether the cluster is a single machine."""
    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1


def service_ip() -> str:
    """Address of this node for its peers; on a single machine nothing needs to leave it."""
    if is_one_node():
        return LOOPBACK
    return str(ray.get_runtime_context().worker.node_ip_address)
