"""The null engine as a process: `python -m serving.null_engine`, or `running` from a program.

    python -m serving.null_engine --port 9001 --ttft-ms 50 --itl-ms 10 [--tokens-per-send 16]

What a load client or a router adds is measured against it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from serving.null_server import NullEngine, Pace, Sent

_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Running:
    """A null engine that is up: its base URL and process id."""

    url: str
    pid: int

    def log(self) -> dict[str, Sent]:
        """What it has sent since the last call, by request id."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}/log", timeout=_START_S) as answer:
            lines = answer.read().decode().splitlines()
        return {sent.request_id: sent for sent in (Sent(**json.loads(line)) for line in lines)}


@contextmanager
def running(pace: Pace, core: int | None = None) -> Iterator[Running]:
    """A null engine in a process of its own, on `core` where one is given; it ends with the block.

    Raises:
        RuntimeError: It did not come up.
    """
    times = ["--ttft-ms", str(pace.ttft_ns / 1e6), "--itl-ms", str(pace.itl_ns / 1e6)]
    command = [sys.executable, "-m", "serving.null_engine", *times]
    command += ["--tokens-per-send", str(pace.tokens_per_send)]
    command += [] if core is None else ["--core", str(core)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the null engine ended with {process.wait(_START_S)}: see above")
        yield Running(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.wait(_START_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Prints its port first."""
    args = _parser().parse_args(argv)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    pace = Pace(int(args.ttft_ms * 1e6), int(args.itl_ms * 1e6), args.tokens_per_send)
    try:
        engine = NullEngine(args.host, args.port, pace)
    except OSError as error:
        print(f"null engine: {args.host}:{args.port}: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, engine.stop)
    print(engine.port, flush=True)
    engine.serve()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.null_engine",
        description="An OpenAI-compatible server without a model, which knows when it sent.",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--ttft-ms", type=_not_below(float, 0), default=0.0)
    parser.add_argument("--itl-ms", type=_not_below(float, 0), default=0.0, help="0: no delay")
    parser.add_argument("--tokens-per-send", type=_not_below(int, 1), default=1)
    parser.add_argument("--core", type=int, help="the core that it keeps to")
    return parser


def _not_below(kind: type[int] | type[float], least: int) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: a number, not below {least}")
        return value

    return read


if __name__ == "__main__":
    sys.exit(main())
