"""Gloo ranks that live for the whole test session, and the workload points that they run."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ep_ray.a2a.procedure import Procedure
from ep_ray.backends.base import Spec
from ep_ray.config.schema import Dtype

WORLD = 4
DEADLINE_S = 120.0
WORKER = Path(__file__).parent / "a2a_worker.py"


class Pool:
    """Long-lived gloo ranks; a case runs on the first `ep` of them."""

    def __init__(self, store: Path) -> None:
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(rank), str(WORLD), str(store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
            )
            for rank in range(WORLD)
        ]

    def call(self, ep: int, case: str, *arguments: Any) -> list[Any]:
        """Answers of the ranks, in order."""
        answers = self.outcomes(ep, case, *arguments)
        errors = [error for _, error in answers if error]
        assert not errors, errors[0]
        return [value for value, _ in answers]

    def outcomes(self, ep: int, case: str, *arguments: Any) -> list[tuple[Any, str | None]]:
        """Answer and traceback of each rank; one of them is None."""
        for rank in self.ranks[:ep]:
            assert rank.stdin is not None
            rank.stdin.write(pickle.dumps((case, arguments)))
            rank.stdin.flush()
        deadline = time.monotonic() + DEADLINE_S
        return [self._answer(rank, deadline) for rank in self.ranks[:ep]]

    def _answer(self, rank: subprocess.Popen[bytes], deadline: float) -> Any:
        assert rank.stdout is not None
        ready, _, _ = select.select([rank.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"rank process {rank.pid} did not answer within {DEADLINE_S} s"
        return pickle.load(rank.stdout)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate(timeout=10)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(tmp_path_factory.mktemp("gloo") / "store")
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def spec() -> Any:
    def make(ep: int, dtype: Dtype = Dtype.fp8, **changes: Any) -> Spec:
        shape = {"tokens": 24, "hidden": 512, "experts": 32, "topk": 4} | changes
        return Spec(ep=ep, dispatch_dtype=dtype, **shape)

    return make


@pytest.fixture(scope="session")
def procedure() -> Any:
    def make(**changes: Any) -> Procedure:
        return Procedure(**({"iterations": 5, "seed": 3, "max_warmup": 20} | changes))

    return make
