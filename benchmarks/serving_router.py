"""Compares the router with other routers on one machine; not a test, for it measures.

Usage, from the repository's root: `python -m benchmarks.serving_router [--repeats 5]`.

The router under test has a core to itself; client and null engines share one where there is no
third. Within a repeat every peer is measured once, and repeats begin with another peer each, so
that a slow minute of the machine hits all of them. Cells are medians over repeats. Peers that are
not installed are left out: nginx and haproxy come from the distribution, `vllm-router` from its
own environment (`--vllm-router PATH`). Needs gcc and two cores. `--processes N` adds a row of
ep-ray's router as N processes on one port, which needs N - 1 cores more to mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.router_peers import (
    ENGINE_CORE,
    EP_RAY,
    LOAD_CORE,
    ROUTER_CORE,
    available,
    build,
    cpu_s,
    engines,
    router_cores,
    started,
)

ENGINES = 4
RUN_S = 600.0

Result = Mapping[str, float]


@dataclass(frozen=True)
class Case:
    """One load.

    Attributes:
        title: What is sent, for the report.
        engine: Options of the null engines.
        concurrency: Requests in flight.
        requests: Measured requests.
        tokens: Tokens of each response, and one more chunk with the usage.
        stagger_us: Delay between the first requests, so that they are not in step.
    """

    title: str
    engine: tuple[str, ...]
    concurrency: int
    requests: int
    tokens: int
    stagger_us: int = 0


PACED = ("--ttft-ms", "50", "--itl-ms", "10")
CASES = {
    "ttft": Case("first token behind 50 ms, spread", PACED, 64, 2000, 16, stagger_us=3125),
    "burst": Case("first token behind 50 ms, in step", PACED, 64, 2000, 16),
    "one": Case("one token at once", (), 64, 40000, 1),
    "coalesced": Case("256 tokens, 16 per send", ("--coalesce", "16"), 64, 4000, 256),
    "paced": Case("128 tokens at 10 ms, one per send", PACED, 256, 768, 128),
}


@dataclass(frozen=True)
class Column:
    """A column of the report: a figure of one case; `direct` is the same repeat without router."""

    title: str
    case: str
    value: Callable[[Result, Result], float]
    decimals: int = 0


COLUMNS = [
    Column("added TTFT p50, ms", "ttft", lambda r, d: r["ttft_p50"] - d["ttft_p50"], 2),
    Column("p99, ms", "ttft", lambda r, d: r["ttft_p99"] - d["ttft_p99"], 2),
    Column("in step: p50, ms", "burst", lambda r, d: r["ttft_p50"] - d["ttft_p50"], 2),
    Column("p99, ms", "burst", lambda r, d: r["ttft_p99"] - d["ttft_p99"], 2),
    Column("one-token req/s", "one", lambda r, d: r["req_s"]),
    Column("CPU us/req", "one", lambda r, d: 1e3 * r["cpu_ms_per_1k_requests"] / 1e3, 1),
    Column("chunks/s, 16 per send", "coalesced", lambda r, d: r["chunk_s"]),
    Column("CPU ms/1k chunks, 16 per send", "coalesced", lambda r, d: r["cpu_ms_per_1k_chunks"], 2),
    Column("CPU ms/1k chunks, paced", "paced", lambda r, d: r["cpu_ms_per_1k_chunks"], 1),
]


def main() -> None:
    """Runs the comparison and prints its Markdown table."""
    args = _arguments()
    peers = available(args.vllm_router, args.processes)
    names = [name for name in peers if name.partition(" ")[0] in args.peers]
    if EP_RAY in names:
        import ray

        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    before = os.getloadavg()
    found: dict[str, list[dict[str, Result]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for key in args.cases:
            found[key] = _measure(CASES[key], names, Path(folder), args)
    print(report(found, names, before, os.getloadavg()))
    if args.processes > 1:
        print(f"{EP_RAY} x{args.processes} on cores {router_cores(args.processes)}.")


def _arguments() -> argparse.Namespace:
    everyone = ["direct", "ep-ray", "vllm-router", "nginx", "haproxy"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peers", nargs="+", choices=everyone, default=everyone)
    parser.add_argument("--processes", type=int, default=1, help="a row of ep-ray with so many")
    parser.add_argument("--vllm-router", default="vllm-router", help="its executable")
    return parser.parse_args()


def _measure(
    case: Case, names: Sequence[str], folder: Path, args: argparse.Namespace
) -> list[dict[str, Result]]:
    """One result by peer for each repeat."""
    engine, client = build(folder, "null_engine"), build(folder, "rawload")
    with (
        engines(engine, ENGINES, case.engine, ENGINE_CORE) as ports,
        started(names, ports, folder, args.vllm_router) as peers,
    ):
        repeats = []
        for repeat in range(args.repeats):
            turn = repeat % len(names)
            order = [*names[turn:], *names[:turn]]
            repeats.append({name: _run(case, client, peers[name]) for name in order})
        return repeats


def _run(case: Case, client: Path, peer: Any) -> Result:
    """The client's figures, and the CPU time that the router took meanwhile."""
    warmup = case.concurrency
    options = {"port": peer.port, "conc": case.concurrency, "requests": case.requests,
               "tokens": case.tokens, "warmup": warmup, "stagger-us": case.stagger_us}  # fmt: skip
    command = ["taskset", "-c", str(LOAD_CORE), str(client)]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    before_s = cpu_s(peer.pids)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=RUN_S)
    used_ms = 1e3 * (cpu_s(peer.pids) - before_s)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
    sent = case.requests + warmup
    return {
        **{k: v for k, v in json.loads(done.stdout).items() if isinstance(v, int | float)},
        "cpu_ms_per_1k_requests": used_ms / sent * 1e3,
        "cpu_ms_per_1k_chunks": used_ms / (sent * case.tokens) * 1e3,
    }


def report(
    found: Mapping[str, Sequence[Mapping[str, Result]]],
    names: Sequence[str],
    load_before: Sequence[float],
    load_after: Sequence[float],
) -> str:
    """The table, and under it what it was measured with."""
    columns = [column for column in COLUMNS if column.case in found]
    lines = [
        f"| router | {' | '.join(column.title for column in columns)} |",
        f"|---|{'---:|' * len(columns)}",
    ]
    for name in names:
        cells = [_cell(column, name, found[column.case]) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    repeats = len(next(iter(found.values())))
    lines += [
        "",
        f"Medians over {repeats} repeats (lowest to highest); router, client and engines on ",
    ]
    lines[-1] += f"cores {ROUTER_CORE}, {LOAD_CORE}, {ENGINE_CORE} of {os.cpu_count()}; "
    lines[-1] += f"load average {load_before[0]:.1f} before, {load_after[0]:.1f} after."
    return "\n".join(lines)


def _cell(column: Column, name: str, repeats: Sequence[Mapping[str, Result]]) -> str:
    added = "added" in column.title or column.title.startswith(("p99", "in step"))
    if name == "direct" and (added or "CPU" in column.title):
        return "-"
    values = [column.value(r[name], r.get("direct", r[name])) for r in repeats]
    places = f",.{column.decimals}f"
    low, high = f"{min(values):{places}}", f"{max(values):{places}}"
    return f"{median(values):{places}} ({low} to {high})"


if __name__ == "__main__":
    main()
