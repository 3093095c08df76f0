"""One warm Ray session for a whole sweep: a local cluster, or one that exists already."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ep_ray import guard
from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import Cluster
from ep_ray.inventory import Machine, local_machine

NAMESPACE = "ep_ray"
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_ATTACH_S = 60.0
_CONNECT_S = 10.0
_MARK = "EP_RAY_SESSION"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """One node of the cluster: Ray's id and address, and what the machine has."""

    node_id: str
    ip: str
    machine: Machine
    worker_ports: tuple[int, int] | None


class Session:
    """Ray for the length of a sweep.

    Args:
        cluster: Where trials run.
        ranks: Most ranks that run at once; a local CPU cluster offers as many CPU slots,
            whatever the machine has, because slots only place ranks.
    """

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        self._cluster = cluster
        self.ranks = ranks
        self._started = False
        self._guard: subprocess.Popen[bytes] | None = None
        self.nodes: tuple[Node, ...] = ()

    def start(self) -> None:
        """Starts or joins the cluster and reads every node's hardware; later calls do nothing.

        Raises:
            ConfigError: The cluster cannot be reached.
        """
        if self.nodes:
            return
        if not ray.is_initialized():
            self._started = True
            self._init()
        # A cluster of its own is here, and a task would wait for a process to start.
        ask = _here if self._started and not self._cluster.address else _remotely
        self.nodes = tuple(
            Node(n["NodeID"], n["NodeManagerAddress"], *ask(n["NodeID"]))
            for n in ray.nodes()
            if n["Alive"]
        )

    def _init(self) -> None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if not self._cluster.mask_gpus:
            os.environ[NOSET] = "1"
        _absolute_python_path()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if self._cluster.address:
                self._attach(self._cluster.address)
            else:
                self._local()
        except SystemExit:  # while Ray starts, SIGTERM means this
            raise KeyboardInterrupt from None
        except Exception as error:
            where = self._cluster.address or "a local cluster"
            raise ConfigError(
                f"Ray could not use {where} (cluster.address={self._cluster.address}): {error}\n"
                "  for a running cluster: `ray status` must answer here, with the same Ray "
                "version and RAY_AUTH_MODE=token if it uses tokens; "
                "without one: cluster=local"
            ) from error
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray has set its own

    def _attach(self, address: str) -> None:
        _check_listening(address)
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    def _local(self) -> None:
        self._guard = _start_guard()
        # Ray would start a process for every CPU slot before anybody asks for one.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        cores = self._cluster.cpus or os.cpu_count() or 1
        ray.init(
            address="local",  # not one that somebody started, which Ray would prefer
            num_cpus=max(cores, self.ranks + 2),
            num_gpus=self._cluster.gpus,
            include_dashboard=self._cluster.dashboard,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    @property
    def dashboard_url(self) -> str | None:
        """Where the Ray dashboard shows the run, or None without one."""
        url = ray.get_runtime_context().worker.node.webui_url if ray.is_initialized() else None
        return f"http://{url}" if url else None

    def check_ports(self, ports: Sequence[int]) -> None:
        """Warns where Ray's worker ports of a node cover ports that engines need."""
        for node in self.nodes:
            if node.worker_ports is None:
                continue
            low, high = node.worker_ports
            inside = [port for port in ports if low <= port <= high]
            if inside:
                _log.warning(
                    "Ray's workers on %s may take ports %d to %d, and engines need %s: start Ray "
                    "with --min-worker-port=20000 --max-worker-port=29999, or move the engines "
                    "(arm.api_port=, arm.vllm_port=, arm.rpc_port=)",
                    node.ip, low, high, inside,
                )  # fmt: skip

    def close(self) -> None:
        """Leaves Ray; a cluster that this session started ends with it, to the last process."""
        if self._started and ray.is_initialized():
            handler = signal.getsignal(signal.SIGTERM)
            ray.shutdown()
            signal.signal(signal.SIGTERM, handler)  # Ray has reset it, unseen by Python
        self._started = False
        if self._guard is not None:
            _dismiss(self._guard)
            self._guard = None


def _start_guard() -> subprocess.Popen[bytes]:
    """Marks the environment that Ray's processes inherit; see `ep_ray.guard`."""
    os.environ[_MARK] = uuid.uuid4().hex
    os.environ["SPT_NOENV"] = "1"  # process titles must not overwrite the mark
    command = [sys.executable, "-I", "-S", guard.__file__, f"{_MARK}={os.environ[_MARK]}"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _dismiss(process: subprocess.Popen[bytes]) -> None:
    """Lets the guard end what is left, and waits for it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        failed = process.wait(guard.KILL_S + _ATTACH_S)
    except subprocess.TimeoutExpired:
        failed = 1
    if failed:
        mark = f"{_MARK}={os.environ[_MARK]}".encode()
        _log.warning("processes %s of this sweep cannot be killed", guard.marked(mark))


def _check_listening(address: str) -> None:
    """Raises OSError if nobody listens at `host:port`: Ray itself would wait for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _absolute_python_path() -> None:
    # Workers start in another folder: relative entries, and the checkout itself, must be absolute.
    entries = [e for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e]
    checkout = str(Path(__file__).resolve().parents[1])
    paths = [str(Path(e).resolve()) for e in entries]
    if checkout not in paths and "site-packages" not in checkout:
        paths.append(checkout)
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def on_node(function: Any, node_id: str) -> Any:
    """`function` as a task on one node that sees all its GPUs; `.remote(...)` calls it."""
    pin = NodeAffinitySchedulingStrategy(node_id, soft=False)
    # A task without GPUs would see none: the environment keeps Ray from hiding them.
    env = {NOSET: "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return ray.remote(function).options(
        num_cpus=0, max_retries=0, scheduling_strategy=pin, runtime_env={"env_vars": env}
    )


_Found = tuple[Machine, tuple[int, int] | None]
"""What is on a node, and the range of its workers' ports."""


def _remotely(node_id: str) -> _Found:
    pin = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_here).options(scheduling_strategy=pin, name="inventory", num_cpus=0)
    found: _Found = ray.get(task.remote(node_id), timeout=_ATTACH_S)
    return found


def _here(node_id: str) -> _Found:
    raylet = _raylet(node_id)
    # A task without GPUs may see none; what counts is what this node's raylet hands out.
    environ = _environ(raylet) if raylet else os.environ
    return local_machine(environ), _worker_ports(_flags(raylet)) if raylet else None


def _raylet(node_id: str) -> psutil.Process | None:
    """The raylet of a node of this machine; None if it is not visible."""
    for process in psutil.process_iter(["name", "cmdline"]):
        flags = _flags(process) if process.info["name"] == "raylet" else {}
        # One that ends just now, of another cluster, has no command line any more.
        if flags and node_id.startswith(flags.get("node_id", node_id)[:8]):
            return process
    return None


def _environ(process: psutil.Process) -> Mapping[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return os.environ


def _flags(process: psutil.Process) -> dict[str, str]:
    try:
        line = process.cmdline()
    except psutil.Error:
        return {}
    return dict(a.lstrip("-").split("=", 1) for a in line if a.startswith("-") and "=" in a)


def _worker_ports(flags: dict[str, str]) -> tuple[int, int] | None:
    """The range from which a raylet gives its workers ports; None where it has no limits."""
    low, high = int(flags.get("min_worker_port", 0)), int(flags.get("max_worker_port", 0))
    return (low, high) if high else None
