"""A Ray cluster of this machine for tests, with CPU ranks on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def local_ray(slots: int) -> Iterator[None]:
    """Starts a cluster with `slots` CPU slots, whatever the machine has, and ends it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ray.init(
        address="local",
        num_cpus=slots,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()
        del os.environ["GLOO_SOCKET_IFNAME"]
