"""The link matrix as `nvidia-smi topo -m` prints it."""

from __future__ import annotations

from ep_ray.topology import all_nvlink, gpus_in, parse_topology

EIGHT_GPU_STYLE = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPIX\t48-95,144-191\t1\t\tN/A
NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
PCIE = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\t0-31\t0
GPU1\tNV4\t X \tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \t32-63\t1
"""
ALONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n"


def test_matrix_with_nics_by_name() -> None:
    matrix = parse_topology(EIGHT_GPU_STYLE)
    assert matrix["GPU0"] == {"GPU1": "NV18", "mlx5_0": "PIX", "mlx5_1": "SYS"}
    assert matrix["mlx5_1"] == {"GPU0": "SYS", "GPU1": "PIX", "mlx5_0": "SYS"}
    assert gpus_in(matrix) == ["GPU0", "GPU1"]
    assert all_nvlink(matrix)


def test_one_pair_without_nvlink_is_enough() -> None:
    assert not all_nvlink(parse_topology(PCIE))


def test_one_gpu_has_no_links() -> None:
    matrix = parse_topology(ALONE)
    assert matrix == {"GPU0": {}}
    assert not all_nvlink(matrix)


def test_nothing_to_parse() -> None:
    assert parse_topology("") == {}
    assert not all_nvlink({})
