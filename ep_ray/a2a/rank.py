"""The Ray actor that hosts one rank of a communicator, pinned to one GPU or on the CPU."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ep_ray.a2a.bench import require_size, run_trial
from ep_ray.a2a.links import Fabric, measure_fabric
from ep_ray.a2a.procedure import Procedure, TrialResult
from ep_ray.address import service_ip
from ep_ray.backends import registry
from ep_ray.backends.base import Spec
from ep_ray.inventory import effective_env, local_machine, versions


@dataclass(frozen=True)
class Membership:
    """Which place in which communicator an actor holds.

    Attributes:
        rank: Place in the group.
        world: Ranks in the group.
        host: Where rank 0's store listens.
        port: Its port; a new store means a new communicator.
        communicator: What torch.distributed runs on: `gloo` or `nccl`.
    """

    rank: int
    world: int
    host: str
    port: int
    communicator: str


@dataclass(frozen=True)
class Report:
    """A trial as one rank saw it, in one answer.

    Attributes:
        result: Its timings.
        nccl_log: What NCCL wrote to this rank's log so far.
    """

    result: TrialResult
    nccl_log: list[str]


class Rank:
    """One rank. Calls that wait for peers leave threads free for `facts` and `stacks`."""

    def __init__(self, gpu: int | None = None, env: Mapping[str, str] | None = None) -> None:
        """Takes the device with index `gpu` among those that this process sees, or the CPU.

        Args:
            gpu: None for the CPU.
            env: What asks libraries for a transport. They read it when they open a communicator;
                in Ray's own runtime environment it would cost each rank a process of its own kind.

        Raises:
            ValueError: There is no such GPU.
        """
        os.environ.update(env or {})
        if gpu is not None and gpu >= torch.cuda.device_count():
            raise ValueError(
                f"GPU {gpu} was asked for, torch sees {torch.cuda.device_count()}"
                f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})"
            )
        self._device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
        self._store: TCPStore | None = None
        self._member: Membership | None = None
        self._fabric: Fabric | None = None
        self._joining = False

    def _enter(self) -> None:
        # Both are per thread, and Ray picks a thread of the pool for each call.
        torch.set_num_threads(1)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def facts(self) -> dict[str, Any]:
        """Where this rank runs: node, process and GPU."""
        context = ray.get_runtime_context()
        return {
            "node_id": context.get_node_id(),
            "node_ip": service_ip(),
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "env": effective_env(),
            "versions": versions(),
            "machine": local_machine().as_dict(),
            **self._gpu(),
        }

    def _gpu(self) -> dict[str, Any]:
        if self._device.type == "cpu":
            return {"gpu_index": None, "gpu_uuid": None, "gpu_name": None}
        properties = torch.cuda.get_device_properties(self._device)
        return {
            "gpu_index": self._device.index,
            "gpu_uuid": str(properties.uuid),
            "gpu_name": properties.name,
        }

    def nccl_log(self) -> list[str]:
        """What NCCL wrote to this rank's log so far; empty on the CPU."""
        path = Path(os.environ.get("NCCL_DEBUG_FILE", ""))
        return path.read_text(errors="replace").splitlines() if path.is_file() else []

    def stacks(self) -> str:
        """Python stacks of all threads, also while a collective hangs."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame))
            for ident, frame in sys._current_frames().items()
        )

    def serve_store(self, world: int) -> tuple[str, int]:
        """Rank 0 only: binds a fresh store on a free port for `world` ranks; host and port."""
        host = service_ip()
        self._store = TCPStore(host, 0, world, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, member: Membership, timeout_s: float) -> None:
        """Creates the communicator with its peers; nothing to do if it stands already.

        A rank whose join failed is of no further use: torch.distributed keeps part of the
        group that never stood, and a later group would wait for peers under another name.

        Raises:
            torch.distributed.DistError: Peers did not come within `timeout_s`.
            RuntimeError: An earlier join failed.
        """
        self._enter()
        if member == self._member:
            return
        if self._joining:
            raise RuntimeError("an earlier join failed; kill this actor and start a new one")
        self.leave()
        self._joining = True
        timeout = timedelta(seconds=timeout_s)
        store = self._store
        if member.rank or store is None:
            store = TCPStore(member.host, member.port, member.world, timeout=timeout)
        dist.init_process_group(
            member.communicator,
            store=store,
            rank=member.rank,
            world_size=member.world,
            timeout=timeout,
            device_id=self._device if self._device.type == "cuda" else None,
        )
        self._member, self._joining = member, False

    def leave(self) -> None:
        """Destroys the communicator, if there is one."""
        self._enter()
        self._member = self._fabric = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def probe(self, backend: str, options: dict[str, Any]) -> list[str]:
        """Reasons why `backend` cannot run in this process; empty when it can."""
        return registry.load(backend, options).probe(os.environ)

    def run(
        self,
        spec: Spec,
        procedure: Procedure,
        backend: str,
        options: dict[str, Any],
        table: NDArray[np.int64] | None = None,
    ) -> Report:
        """Runs one trial with the peers of the communicator, see `run_trial`; reads NCCL's log.

        The links are measured in a communicator's first trial, for all of them.

        Raises:
            RuntimeError: `join` was not called.
        """
        self._enter()
        if self._member is None or dist.group.WORLD is None:
            raise RuntimeError("this rank belongs to no communicator; call `join` before `run`")
        chosen, world = registry.load(backend, options), dist.group.WORLD
        require_size(spec, world)
        if self._fabric is None:
            self._fabric = measure_fabric(world, self._device)
        result = run_trial(spec, procedure, chosen, world, self._device, self._fabric, table)
        return Report(result, self.nccl_log())


RankActor = ray.remote(max_concurrency=4, max_restarts=0)(Rank)
"""`Rank` as an actor. It is not restarted: a restarted rank cannot rejoin its peers."""


def assemble(actors: Sequence[Any], communicator: str, timeout_s: float) -> None:
    """Makes one communicator of `actors`, in the order of their ranks.

    Smaller groups use the first actors: EP2 on four actors leaves the other two alone.

    Raises:
        ray.exceptions.GetTimeoutError: It did not stand within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    world = len(actors)
    host, port = ray.get(actors[0].serve_store.remote(world), timeout=timeout_s)
    members = [Membership(rank, world, host, port, communicator) for rank in range(world)]
    left_s = max(0.0, deadline - time.monotonic())
    joins = [
        actor.join.remote(member, left_s) for actor, member in zip(actors, members, strict=True)
    ]
    ray.get(joins, timeout=left_s)
