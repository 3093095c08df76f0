"""Whether a third-party library can run here: each function returns reasons against, in words.

Packages are looked for without being imported. Only `imports` imports, and is asked last.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from ep_ray.inventory import loaded_nccl

_SMI_TIMEOUT_S = 20


def package(name: str, how: str) -> list[str]:
    """Against: the package `name` (dots allowed) is not installed; `how` says how to get it."""
    top, *below = name.split(".")
    # `find_spec` of a dotted name would import the packages above it.
    inside = not below or any(folder.joinpath(*below).exists() for folder in folders(top))
    if find_spec(top) is not None and inside:
        return []
    return [f"there is no package {name!r} in this Python; {how}"]


def folders(package: str) -> list[Path]:
    """Where the top-level `package` lies; empty if it is not installed."""
    spec = find_spec(package)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]


def imports(module: str) -> list[str]:
    """Against: importing `module` fails. It is imported: ask when nothing cheaper is against."""
    try:
        import_module(module)
    except Exception as error:
        return [f"`import {module}` fails: {type(error).__name__}: {error}"]
    return []


def python(least: tuple[int, int], why: str) -> list[str]:
    """Against: this Python is older than `least`."""
    if sys.version_info[:2] >= least:
        return []
    return [f"Python {least[0]}.{least[1]} or newer is needed ({why}); this is {sys.version[:6]}"]


def gpu(least: tuple[int, int] = (9, 0)) -> list[str]:
    """Against: torch sees no GPU, or one whose compute capability is below `least`."""
    if not torch.cuda.is_available():
        return ["torch sees no CUDA GPU; check the driver and CUDA_VISIBLE_DEVICES"]
    lowest = min(_compute_capabilities(), default=least)
    if lowest >= least:
        return []
    return [
        f"compute capability {least[0]}.{least[1]} or higher is needed;"
        f" a GPU here has {lowest[0]}.{lowest[1]}"
    ]


def _compute_capabilities() -> list[tuple[int, int]]:
    # Not torch: it would make a CUDA context, which takes GPU memory from those who run.
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    pairs = (line.strip().split(".") for line in done.stdout.splitlines() if "." in line)
    return [(int(major), int(minor)) for major, minor in pairs]


def compiler(env: Mapping[str, str]) -> list[str]:
    """Against: there is no nvcc for kernels that are compiled at first use."""
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    if (home and (Path(home) / "bin" / "nvcc").exists()) or shutil.which("nvcc"):
        return []
    return ["kernels are compiled at first use and there is no nvcc; set CUDA_HOME or PATH"]


def nic() -> list[str]:
    """Against: there is no RDMA device (InfiniBand, RoCE or EFA)."""
    if any(Path("/sys/class/infiniband").glob("*")):
        return []
    return ["an RDMA network card is needed and /sys/class/infiniband lists none"]


def nccl(least: tuple[int, int, int]) -> list[str]:
    """Against: the NCCL that torch has loaded is older than `least`.

    A second copy of NCCL does not help: the dynamic linker gives every library the copy that
    was loaded first.
    """
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return []
    found = loaded_nccl()
    if found is None:
        return ["no NCCL is loaded: torch has it built in, or has none"]
    if found >= least:
        return []
    return [
        f"NCCL {'.'.join(map(str, least))} or newer is needed, torch runs on"
        f" {'.'.join(map(str, found))}; install nvidia-nccl-cu13 of that version and start with"
        " LD_PRELOAD=<site-packages>/nvidia/nccl/lib/libnccl.so.2"
    ]


def gdrcopy() -> list[str]:
    """Against: the GDRCopy driver is not loaded."""
    if os.path.exists("/dev/gdrdrv"):
        return []
    return ["GDRCopy is needed and /dev/gdrdrv does not exist; load the gdrdrv kernel module"]
