"""What a sweep costs beside what it measures: 24 all-to-all cells at EP4 over gloo.

    python benchmarks/a2a_cost.py [--seconds 0.5 5] [--torchruns 24]

1. The gap between the end of one trial's last sample and the start of the next one's first, on warm
   ranks: reading logs and counters, writing rows, drawing and planning routings, the correctness
   check. (Rows say when samples were taken: `timed_unix_ns`, `timed_ns`.)
2. Wall time of the whole command over the sum of its measured time (`timed_ns`).
3. The same cells as people run them by hand: one `torchrun` of a plain script for each, with as
   many operations. Nothing is checked there, and nothing recorded.

A start costs what it costs, so 2 falls and 3 rises with the length of a cell: both are printed for
short cells and for long ones.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

RANKS, HIDDEN, EXPERTS, TOPK = 4, 1024, 16, 4
TOKENS = (1, 8, 16, 32, 64, 128)
ROUTINGS = ("uniform", "zipf", "balanced", "one_hot")
WARMUP = 5


def sweep(iterations: dict[int, int], results: str) -> tuple[float, list[dict[str, int]]]:
    """Wall seconds of the command, and (start, length) of each cell's samples in ns, in order."""
    phases = ",".join(f"t{t}:{{tokens:{t},iterations:{n}}}" for t, n in iterations.items())
    command = [
        *(sys.executable, "-m", "ep_ray.sweep", "+exp=quickstart", "measure=[a2a]"),
        *(f"workload.ep=[{RANKS}]", f"workload.routing=[{','.join(ROUTINGS)}]"),
        *(f"+workload.phases={{{phases}}}", "~workload.phases.decode", "~workload.phases.prefill"),
        *(f"workload.min_warmup={WARMUP}", f"workload.max_warmup={WARMUP}"),
        *("cluster.dashboard=false", f"results={results}"),
    ]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    wall_s = time.monotonic() - start
    if done.returncode:
        sys.exit(f"the sweep failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    (folder,) = Path(results).iterdir()
    return wall_s, timed(folder)


def timed(folder: Path) -> list[dict[str, int]]:
    """When the samples of each trial were taken."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "trials.parquet")
    rows = table.select(["timed_unix_ns", "timed_ns"]).to_pylist()
    return sorted(rows, key=lambda row: row["timed_unix_ns"])


def torchrun(iterations: dict[int, int], runs: int) -> float:
    """Wall seconds of one process group per cell, from the first `runs` of them."""
    start = time.monotonic()
    for number in range(runs):
        tokens, count = list(iterations.items())[number % len(iterations)]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", __file__),
            *("--cell", json.dumps([tokens, count])),
        ]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
        run_alone(command, env)
    return (time.monotonic() - start) * len(TOKENS) * len(ROUTINGS) / runs


def run_alone(command: list[str], env: dict[str, str]) -> None:
    """Runs a command in a session of its own; ranks do not outlive it, whatever happens."""
    process = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        if process.wait(timeout=300):
            sys.exit(f"torchrun ended with {process.returncode}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def cell(tokens: int, iterations: int) -> None:
    """The plain script: dispatch, combine and the pair, a barrier before each."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    row = HIDDEN // 4 + HIDDEN // 128 + 2 * TOPK
    sent, got = (torch.zeros(RANKS * tokens, row, dtype=torch.int32) for _ in "ab")
    out, back = (torch.zeros(RANKS * tokens, HIDDEN // 2, dtype=torch.int32) for _ in "ab")
    ways = ([(got, sent)], [(back, out)], [(got, sent), (back, out)])
    for operations in ways:
        samples = []
        for _ in range(WARMUP + iterations):
            dist.barrier()
            start = time.perf_counter_ns()
            for target, source in operations:
                dist.all_to_all_single(target, source)
            samples.append(time.perf_counter_ns() - start)
        print(statistics.median(samples[WARMUP:]))
    dist.destroy_process_group()


def calibrated(lengths: list[float]) -> dict[float, dict[int, int]]:
    """Iterations per phase that give about so much measured time, s, from a short sweep."""
    few = dict.fromkeys(TOKENS, 50)
    with TemporaryDirectory() as results:
        _, rows = sweep(few, results)
    middle = statistics.median(row["timed_ns"] for row in rows) / 1e9
    return {s: dict.fromkeys(TOKENS, max(10, round(50 * s / middle))) for s in lengths}


def column(iterations: dict[int, int], torchruns: int) -> dict[str, str]:
    """What one sweep cost, and what its cells cost by hand, in words."""
    with TemporaryDirectory() as results:
        wall_s, rows = sweep(iterations, results)
    measured_s = sum(row["timed_ns"] for row in rows) / 1e9
    gaps = [
        (after["timed_unix_ns"] - before["timed_unix_ns"] - before["timed_ns"]) / 1e6
        for before, after in pairwise(rows)
    ]
    within_s = (rows[-1]["timed_unix_ns"] + rows[-1]["timed_ns"] - rows[0]["timed_unix_ns"]) / 1e9
    found = {
        "iterations of a cell": f"{iterations[1]}",
        "gap between trials, median (largest)": (
            f"{statistics.median(gaps):.0f} ms ({max(gaps):.0f} ms)"
        ),
        "measured time, all cells": f"{measured_s:.1f} s",
        "first sample to last": f"{within_s:.1f} s, {within_s / measured_s:.2f} x measured",
        "whole command": f"{wall_s:.1f} s, {wall_s / measured_s:.2f} x measured",
    }
    if torchruns:
        by_hand_s = torchrun(iterations, torchruns)
        scaled = "" if torchruns == len(rows) else f" (scaled from {torchruns})"
        found["one torchrun per cell"] = (
            f"{by_hand_s:.1f} s{scaled}, {by_hand_s / wall_s:.1f} x the sweep"
        )
    return found


def report(lengths: list[float], torchruns: int) -> None:
    before = os.getloadavg()[0]
    columns = []
    for iterations in calibrated(lengths).values():
        columns.append(column(iterations, torchruns))
        print(columns[-1], file=sys.stderr, flush=True)  # a run that is cut short has these
    print(
        f"{len(TOKENS) * len(ROUTINGS)} cells at EP{RANKS}; {os.cpu_count()} cores, load average",
        end=" ",
    )
    print(f"{before:.1f} before\n")
    print(f"| | {' | '.join(f'cells of about {s:g} s' for s in lengths)} |")
    print("|---|" + "---|" * len(lengths))
    for name in columns[0]:
        print(f"| {name} | {' | '.join(found[name] for found in columns)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[0.5, 5.0], help="measured times of a cell"
    )
    most = len(TOKENS) * len(ROUTINGS)
    parser.add_argument(
        "--torchruns", type=int, default=most, help="cells run by hand; fewer are scaled up"
    )
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        cell(*json.loads(asked.cell))
    else:
        report(asked.seconds, asked.torchruns)
