"""NCCL with UCCL's network plugin: the same calls as `nccl`, other packets between nodes.

NCCL loads the plugin when a communicator is made, from `NCCL_NET_PLUGIN`, which must stand in
the environment of the ranks: `transport.env`. Where the plugin finds no network card NCCL quietly
falls back to sockets, and inside a node it is never used; the transport proof tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ep_ray.backends import probing
from ep_ray.backends.nccl import NcclBackend

WRITTEN_AGAINST = "uccl 0.1.1 (lib/libnccl-net-uccl.so)"
HOW = "pip install uccl==0.1.1"


class Uccl(NcclBackend):
    """`NcclBackend` with the plugin in place."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.capabilities = replace(self.capabilities, needs_nic=True)

    def probe(self, env: Mapping[str, str]) -> list[str]:
        reasons = probing.package("uccl", HOW) or _plugin(env)
        return reasons + probing.nic() + super().probe(env)


def _plugin(env: Mapping[str, str]) -> list[str]:
    folders = probing.folders("uccl")
    found = [path for folder in folders for path in folder.glob("lib/libnccl-net-*.so")]
    if not found:
        return [f"the package uccl in {folders[0]} has no lib/libnccl-net-*.so; {HOW}"]
    asked = env.get("NCCL_NET_PLUGIN", "")
    if any(asked in (str(path), path.name) for path in found):
        return []
    return [
        f"NCCL_NET_PLUGIN is {asked or 'not set'}; set"
        f" `transport.env.NCCL_NET_PLUGIN={found[0]}`, or NCCL uses its own network"
    ]
