"""How the GPUs and NICs of a machine are linked, as the driver tells it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

_TIMEOUT_S = 20
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"(?:GPU|NIC)\d+|mlx\w+")
_NIC_NAME = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$", re.MULTILINE)

Matrix = Mapping[str, Mapping[str, str]]
"""Link words by device and device: `NV18` (18 NVLinks), `PIX`, `PXB`, `PHB`, `NODE`, `SYS`."""


def read_topology() -> dict[str, dict[str, str]]:
    """`nvidia-smi topo -m` of this machine; empty without a driver or after 20 s."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_topology(done.stdout)


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """The matrix that `nvidia-smi topo -m` prints, without its diagonal; NICs by their names."""
    plain = _ANSI.sub("", text)
    legend = dict(_NIC_NAME.findall(plain))
    head: list[str] = []
    matrix: dict[str, dict[str, str]] = {}
    for line in plain.splitlines():
        names = [word.strip() for word in line.split("\t")]
        if not head and "GPU0" in names[1:]:
            head = [name for name in names if _DEVICE.fullmatch(name)]
        elif head and _DEVICE.fullmatch(names[0]):
            row = dict(zip(head, names[1:], strict=False))
            matrix[legend.get(names[0], names[0])] = {
                legend.get(name, name): link for name, link in row.items() if link != "X"
            }
    return matrix


def gpus_in(matrix: Matrix) -> list[str]:
    """Names of the GPUs, in the driver's order."""
    return [name for name in matrix if name.startswith("GPU")]


def all_nvlink(matrix: Matrix) -> bool:
    """Whether every pair of GPUs is linked by NVLink; false with fewer than two."""
    gpus = gpus_in(matrix)
    links = [matrix[a].get(b, "") for a in gpus for b in gpus if a != b]
    return bool(links) and all(link.startswith("NV") for link in links)
