"""EP16 on a real local Ray cluster: many more ranks than cores, placed, checked and counted."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from ep_ray.config.compose import compose_all
from ep_ray.config.schema import DeviceKind
from ep_ray.observer import Observer
from sweeps.a2a_host import A2aHost
from sweeps.plan import plan
from sweeps.trial import A2aTrial
from tests.local_ray import local_ray

RANKS = 16
ASKED = (
    *("+exp=quickstart", "measure=[a2a]", f"workload.ep=[{RANKS}]", "workload.hidden=128"),
    *("workload.max_warmup=20", "workload.phases.decode.tokens=4"),
    *("workload.phases.decode.iterations=5", "~workload.phases.prefill"),
)
MOST_MEMORY = 12 * 2**30
"""Bytes that sixteen ranks may hold together: most of it is torch itself, shared between them."""


@pytest.fixture
def sixteen_slots() -> Iterator[None]:
    with local_ray(RANKS + 2):
        yield


def test_sixteen_ranks_exchange_every_row(sixteen_slots: None) -> None:
    (config,) = compose_all(ASKED, multirun=False)
    (trial,) = (t for t in plan(config, DeviceKind.cpu) if isinstance(t, A2aTrial))
    observer = Observer()
    host = A2aHost(config, DeviceKind.cpu, RANKS, f"ep16-{os.getpid()}", observer)
    try:
        outcome = host.run(trial)
        assert (outcome.status, outcome.error) == ("ok", None)
        ranks = host._ranks
        assert ranks is not None
        pids = [fact["pid"] for fact in ranks.facts]
        assert len(set(pids)) == RANKS
        held = sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
        print(f"{RANKS} ranks hold {held / 2**30:.1f} GiB (proportional share)")
        assert held < MOST_MEMORY
        samples = outcome.rows["samples"]
        assert np.unique(samples["rank"].to_numpy()).tolist() == list(range(RANKS))
        assert {row["checked"] for row in outcome.rows["operations"]} == {True}
    finally:
        assert host.close() == []
        observer.close()
