"""What a sweep ran on, as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sweeps.read import load
from sweeps.report import build
from sweeps.tablefmt import Table
from sweeps.view import view


def tables_of(folder: Path) -> dict[str, Table]:
    (section,) = [s for s in build(view(load(folder))) if s.title == "What it ran on"]
    return {b.title: b for b in section.blocks if isinstance(b, Table)}


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def test_versions_that_differ_between_arms_are_told_apart(results: Any, tmp_path: Path) -> None:
    results.trial("a", shape="32/16", concurrency=1)
    results.trial(
        "b", arm="other", shape="32/16", concurrency=1, versions_json='{"vllm": "0.24.0"}'
    )
    for value in (1.0, 3.0):
        at = {"node": "n0", "source": "cpu", "name": "load_1min", "unix_ns": 1}
        results.add("telemetry", "a", value=value, **at)
    tables = tables_of(results.write(tmp_path))
    versions = [row for row in texts(tables["Versions"]) if row[0] == "vllm"]
    assert versions == [["vllm", "0.24.0", "other"], ["vllm", "0.30.0", "wide_tp"]]
    (reading,) = texts(tables["Readings over the sweep"])
    assert reading == ["n0", "cpu", "load_1min", "2", "1", "2", "3"]


def test_machines_ranks_and_variables_are_tables_and_no_raw_json(
    results: Any, tmp_path: Path
) -> None:
    gpu = {"index": 0, "name": "H200", "uuid": "GPU-1", "memory_mib": 143360}
    machine = {"cpu": "X", "cores": 8, "memory_gib": 64.0, "gpus": [gpu, gpu], "ib": ["mlx5_0"]}
    ranks = [{"hostname": "a", "gpu_index": 0}, {"hostname": "a", "gpu_index": 1}]
    hardware = json.dumps({"machines": {"a": machine}, "ranks": ranks})
    env = json.dumps({"0": {"NCCL_DEBUG": "INFO", "X": "1"}, "1": {"NCCL_DEBUG": "INFO", "X": "2"}})
    results.trial("t", hardware_json=hardware, env_json=env, ep=2, shape="32/16", concurrency=1)
    tables = tables_of(results.write(tmp_path))
    assert texts(tables["Machines"]) == [
        ["a", "X", "8", "64.0", "2 x H200 (140 GiB)", "mlx5_0", "none", "none"]
    ]
    assert texts(tables["Ranks"]) == [["wide_tp", "2", "a: 2 ranks (GPU 0 1)"]]
    env_rows = texts(tables["Environment, all ranks together"])
    assert env_rows == [["NCCL_DEBUG", "INFO", "all"], ["X", "1, 2", "all"]]
    shown = [text for table in tables.values() for row in texts(table) for text in row]
    assert not [text for text in shown if "{" in text]


def test_routers_of_several_processes_are_told(results: Any, tmp_path: Path) -> None:
    cell = {"shape": "32/16", "concurrency": 1}
    for arm, processes in (("two", 2), ("one", 1), ("direct", None)):
        routed = {"router": "round_robin" if processes else "none", "router_processes": processes}
        results.trial(arm, arm=arm, **routed, **cell)
        results.add("ledger", arm, endpoint="rank0", role="all", client_sent=1, agrees=True)
    folder = results.write(tmp_path)
    table = tables_of(folder)["Routers of several processes"]
    assert texts(table) == [["two", "round_robin", "2"]]
    (ledger,) = [s for s in build(view(load(folder))) if s.title.startswith("Ledger")]
    (remark,) = [b for b in ledger.blocks if isinstance(b, str) and "processes" in b]
    assert remark.startswith("Router of several processes on one port (two: 2 processes): its col")
