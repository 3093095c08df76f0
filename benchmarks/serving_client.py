"""Compares the load client with `vllm bench serve` on one machine; not a test, for it measures.

    python -m benchmarks.serving_client speed [--repeats 3]
    python -m benchmarks.serving_client agree [--url http://HOST:PORT --model NAME] [--pairs 6]

`speed` measures against `null_engine.c`, which logs when it really sent: client and
engine have a core each; clients take turns. `agree` runs the same load with both clients in
turn, against a server that is up or a null engine, and prints their ratios with intervals.
Needs gcc and two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.client_peers import Cell, Client, EpRay, Figures, VllmBench
from benchmarks.router_peers import build, engines
from ep_ray.cores import seats
from serving.models import make
from sweeps.stats import paired_ratio

CLIENT_CORE, ENGINE_CORE = seats(2)
PACED = ("--ttft-ms", "50", "--itl-ms", "10")
COALESCED = ("--coalesce", "16")
PACED_S = 0.05 + 127 * 0.01  # of one request
VOCAB = 100_000


@dataclass(frozen=True)
class Truth:
    """What the engine's log says of a cell: TTFT percentiles, ms, and the first request, ns."""

    ttft_p50: float
    ttft_p99: float
    first_ns: int


CASES: dict[str, tuple[Sequence[str], Cell]] = {
    "paced c=64": (PACED, Cell(16, 128, 64, 384)),
    "paced c=256": (PACED, Cell(16, 128, 256, 1024)),
    "paced c=1024": (PACED, Cell(16, 128, 1024, 4096)),
    "16 per send c=64": (COALESCED, Cell(16, 256, 64, 2000)),
}


@contextlib.contextmanager
def null_engine(folder: Path, options: Sequence[str]) -> Iterator[str]:
    """The engine's URL; its log is `engine.log`, complete once the block has ended."""
    logged = [*options, "--log", str(folder / "engine.log")]
    with engines(build(folder, "null_engine"), 1, logged, ENGINE_CORE) as (port,):
        yield f"http://127.0.0.1:{port}"


def truth(log: Path) -> Truth:
    """Reads the engine's log: id, received, first and last send, ..."""
    rows = [line.split() for line in log.read_text().splitlines() if not line.startswith("#")]
    received = np.array([int(row[1]) for row in rows])
    first = np.array([int(row[2]) for row in rows])
    p50, p99 = np.percentile((first - received) / 1e6, [50, 99])
    return Truth(float(p50), float(p99), int(received.min()))


def speed(clients: Sequence[Client], folder: Path, repeats: int, cases: Sequence[str]) -> None:
    """Prints a table: TTFT error, CPU per 1,000 tokens, rate, and how soon the first request."""
    print(
        "| load | client | TTFT error p50, ms | p99, ms | ITL p50, ms | CPU ms per 1k tokens |",
        end="",
    )
    print(" tokens/s | of the ideal | first request after, s |\n|---|---|" + "---:|" * 7)
    for name in cases:
        options, cell = CASES[name]
        found: dict[str, list[tuple[Figures, Truth]]] = {client.name: [] for client in clients}
        for repeat in range(repeats):
            turn = repeat % len(clients)
            for client in [*clients[turn:], *clients[:turn]]:
                with null_engine(folder, options) as url:
                    tag = f"{name}-{client.name}-{repeat}".replace(" ", "_")
                    figures = client.run(url, "null", cell, tag)
                found[client.name].append((figures, truth(folder / "engine.log")))
        for client_name, runs in found.items():
            print(_row(name, client_name, cell, options, runs), flush=True)


def _row(
    name: str,
    client: str,
    cell: Cell,
    options: Sequence[str],
    runs: Sequence[tuple[Figures, Truth]],
) -> str:
    tokens = cell.requests * cell.completion
    failed = cell.requests - min(figures.ok for figures, _ in runs)
    paced = options is PACED
    ideal = f"{median(f.tok_s for f, _ in runs) / (cell.concurrency * 128 / PACED_S):.3f}"
    cells = [
        name,
        client + (f" ({failed} failed)" if failed else ""),
        f"{median(f.ttft_p50 - t.ttft_p50 for f, t in runs):.2f}" if paced else "",
        f"{median(f.ttft_p99 - t.ttft_p99 for f, t in runs):.2f}" if paced else "",
        f"{median(f.itl_p50 for f, _ in runs):.3f}" if paced else "",
        _cpu([f.cpu_s for f, _ in runs], tokens),
        f"{median(f.tok_s for f, _ in runs):,.0f}",
        ideal if paced else "",
        f"{median((t.first_ns - f.began_ns) / 1e9 for f, t in runs):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _cpu(runs: Sequence[float | None], tokens: int) -> str:
    known = [cpu_s for cpu_s in runs if cpu_s is not None]
    return f"{median(known) / tokens * 1e6:.1f}" if len(known) == len(runs) else "in the noise"


def agree(clients: Sequence[Client], url: str, model: str, cell: Cell, pairs: int) -> None:
    """Prints throughput and latencies of both clients in turn, and their ratios."""
    found: dict[str, list[Figures]] = {client.name: [] for client in clients}
    clients[0].run(url, model, cell, "agree-warm-up")  # a server's first requests are slow
    for pair in range(pairs):
        for client in clients[:: -1 if pair % 2 else 1]:
            tag = f"agree-{client.name}-{pair}".replace(" ", "_")
            figures = client.run(url, model, cell, tag)
            found[client.name].append(figures)
            print(f"{pair} {client.name:18s} {figures.tok_s:10.1f} tok/s, TTFT p50", end=" ")
            print(f"{figures.ttft_p50:.2f} ms, TPOT p50 {figures.tpot_p50:.3f} ms", flush=True)
    ours, theirs = (found[client.name] for client in clients)
    print("\n| ep-ray / vllm bench serve | ratio | 95 % interval |\n|---|---:|---|")
    for title, key in (
        ("tokens/s", "tok_s"), ("TTFT p50", "ttft_p50"), ("TTFT p99", "ttft_p99"),
        ("TPOT p50", "tpot_p50"), ("ITL p50", "itl_p50"),
    ):  # fmt: skip
        a, b = ({i: getattr(f, key) for i, f in enumerate(side)} for side in (ours, theirs))
        ratio = paired_ratio(a, b)
        if ratio is None or ratio.low is None:
            continue
        print(f"| {title} | {ratio.value:.4f} | {ratio.low:.4f} to {ratio.high:.4f} |")


def main() -> None:
    """Runs what was asked for."""
    args = _arguments()
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        pinned = CLIENT_CORE if args.what == "speed" or not args.url else None
        tokenizer = args.tokenizer or str(make("tiny", folder))
        clients: list[Client] = [EpRay(args.vocab, pinned), VllmBench(tokenizer, folder, pinned)]
        before = os.getloadavg()[0]
        if args.what == "speed":
            wanted = [c for c in clients if c.name in args.clients]
            speed(wanted, folder, args.repeats, args.cases)
        else:
            cell = Cell(args.prompt, args.completion, args.concurrency, args.requests)
            url = args.url or stack.enter_context(null_engine(folder, PACED))
            agree(clients, url, args.model, cell, args.pairs)
        print(f"\nClient on core {CLIENT_CORE}, engine on core {ENGINE_CORE} of ", end="")
        print(f"{os.cpu_count()}; load average {before:.1f} before", end=", ")
        print(f"{os.getloadavg()[0]:.1f} after.")


def _arguments() -> argparse.Namespace:
    names = [EpRay.name, VllmBench.name]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["speed", "agree"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--clients", nargs="+", choices=names, default=names)
    parser.add_argument("--url", help="a server that is up; else a null engine")
    parser.add_argument("--model", default="null")
    parser.add_argument("--tokenizer", help="folder of the model's tokenizer")
    parser.add_argument("--vocab", type=int, default=VOCAB, help="its vocabulary")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--completion", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--requests", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
