"""The routers that `serving_router.py` compares, each started on a core and ports of its own.

Nothing is started system-wide: every peer gets its own configuration in a scratch folder, listens
on loopback, and is ended by its process id.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from ep_ray.cores import keep_to, seats
from serving.router.vllm_router import arguments

START_S = 30.0
EP_RAY = "ep-ray"  # with ` x2` behind it as two processes
# The router has its core to itself; client and engines share one where there is no third.
ROUTER_CORE, LOAD_CORE, ENGINE_CORE = seats(3)

NGINX = """daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000000;
  upstream ranks {{ {servers} keepalive 1024; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://ranks; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_next_upstream off;
    }}
  }}
}}
"""

HAPROXY = """global
  nbthread 1
  maxconn 8192
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  option http-no-delay
  http-reuse always
  retries 0
frontend front
  bind 127.0.0.1:{port} backlog 4096
  default_backend ranks
backend ranks
  balance roundrobin
{servers}
"""


class Peer(Protocol):
    """A router that is up: where it listens and which processes do its work."""

    port: int
    pids: Sequence[int]


class Direct:
    """No router: the first engine itself."""

    def __init__(self, port: int) -> None:
        self.port, self.pids = port, ()


class Served:
    """A router that is a program: its process and children, on the router's core."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.port = port
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                ["taskset", "-c", str(ROUTER_CORE), *command], stdout=out, stderr=out
            )
        try:
            wait_up(port)
        except TimeoutError as error:
            self.close()
            raise SystemExit(f"{command[0]} did not come up: {log.read_text()[-800:]}") from error
        started = psutil.Process(self._process.pid)
        self.pids = [p.pid for p in [started, *started.children(recursive=True)]]

    def close(self) -> None:
        """Ends the process that was started here."""
        end(self._process)


class Actors:
    """ep-ray's router in its Ray actors, one for each process, each with a core of its own."""

    def __init__(self, engine_ports: Sequence[int], processes: int = 1) -> None:
        import ray

        from serving.router.actor import RouterActor
        from serving.router.router import Settings

        self._ray = ray
        remote: Any = RouterActor
        self.port = free_port()
        self._actors = [
            remote.options(num_cpus=0).remote(
                f"bench{i}", port=self.port, settings=Settings(processes=processes, process=i)
            )
            for i in range(processes)
        ]
        endpoints = [(f"r{i}", f"http://127.0.0.1:{port}") for i, port in enumerate(engine_ports)]
        self.pids = []
        for actor, core in zip(self._actors, router_cores(processes), strict=True):
            self.pids.append(self._get(actor.__ray_call__.remote(keep_to, core)))
            self._get(actor.start.remote())
            self._get(actor.set_endpoints.remote(endpoints))

    def _get(self, reference: Any) -> Any:
        return self._ray.get(reference, timeout=START_S)

    def close(self) -> None:
        """Ends the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


def router_cores(processes: int) -> list[int]:
    """The router's core, and one more for each further process, beyond client and engines.

    Where there are too few, the last ones share one, with client and engines too.
    """
    return [ROUTER_CORE, *seats(2 + processes)[3:]]


def build(folder: Path, name: str) -> Path:
    """Compiles `name`.c, which stands beside this file, into `folder`, once."""
    program = folder / name
    if not program.exists():
        source = str(Path(__file__).parent / f"{name}.c")
        subprocess.run(["gcc", "-O2", "-w", "-o", str(program), source], check=True)
    return program


def available(vllm_router: str, processes: int = 1) -> list[str]:
    """Names of the peers whose programs this machine has, ep-ray as `processes` beside one."""
    programs = {"nginx": "nginx", "haproxy": "haproxy", "vllm-router": vllm_router}
    ours = [EP_RAY, f"{EP_RAY} x{processes}"] if processes > 1 else [EP_RAY]
    return ["direct", *ours] + [name for name, p in programs.items() if shutil.which(p)]


@contextlib.contextmanager
def started(
    names: Sequence[str], engine_ports: Sequence[int], folder: Path, vllm_router: str
) -> Iterator[dict[str, Any]]:
    """The named peers in front of these engines; they end with the block."""
    peers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for name in names:
            peer = _start(name, engine_ports, folder, vllm_router)
            peers[name] = peer
            if hasattr(peer, "close"):
                stack.callback(peer.close)
        yield peers


def _start(name: str, engine_ports: Sequence[int], folder: Path, vllm_router: str) -> Any:
    if name == "direct":
        return Direct(engine_ports[0])
    if name.startswith(EP_RAY):
        return Actors(engine_ports, int(name.removeprefix(EP_RAY).removeprefix(" x") or 1))
    port, log = free_port(), folder / f"{name}.log"
    if name == "nginx":
        servers = " ".join(f"server 127.0.0.1:{p} max_fails=0;" for p in engine_ports)
        path = _write(folder / "nginx.conf", NGINX, folder=folder, port=port, servers=servers)
        return Served([name, "-e", str(log), "-p", str(folder), "-c", path], port, log)
    if name == "haproxy":
        servers = "\n".join(f"  server r{i} 127.0.0.1:{p}" for i, p in enumerate(engine_ports))
        path = _write(folder / "haproxy.cfg", HAPROXY, port=port, servers=servers)
        return Served([name, "-f", path], port, log)
    urls = [f"http://127.0.0.1:{p}" for p in engine_ports]
    return Served([vllm_router, *arguments("127.0.0.1", port, free_port(), urls)], port, log)


def _write(path: Path, template: str, **values: object) -> str:
    path.write_text(template.format(**values))
    return str(path)


@contextlib.contextmanager
def engines(program: Path, count: int, options: Sequence[str], core: int) -> Iterator[list[int]]:
    """Null engines on a core; their ports."""
    ports = [free_port() for _ in range(count)]
    command = ["taskset", "-c", str(core), str(program)]
    processes = [subprocess.Popen([*command, "--port", str(p), *options]) for p in ports]
    try:
        for port in ports:
            wait_up(port)
        yield ports
    finally:
        for process in processes:
            end(process)


def cpu_s(pids: Sequence[int]) -> float:
    """User and system time that these processes have used so far, in seconds."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(t.user + t.system for t in times))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_up(port: int) -> None:
    """Returns once `GET /v1/models` answers there. Raises `TimeoutError`."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_S
    while True:
        try:
            opener.open(f"http://127.0.0.1:{port}/v1/models", timeout=START_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing answers on port {port}: {error}") from error
            time.sleep(0.05)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that was started here, and waits for it."""
    process.terminate()
    try:
        process.wait(START_S)
    except subprocess.TimeoutExpired:
        print(f"{process.args} did not end: killed", file=sys.stderr)
        process.kill()
        process.wait(START_S)
