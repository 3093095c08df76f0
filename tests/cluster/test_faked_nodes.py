"""Four faked nodes of one machine: placement, rank order, the doctor and the observer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import pytest
import ray
from ray.cluster_utils import Cluster

from ep_ray.observer import Observer
from ep_ray.placement import PlacementError, Slot, find_slots, rank_order, release, reserve
from ep_ray.session import NOSET
from sweeps.doctor.node import examine_cluster

NODES, GPUS = 4, 2
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Nodes that claim two GPUs each; nothing here touches one."""
    # The dashboard's process would only cost memory and start-up time.
    head = {"num_cpus": 3, "num_gpus": GPUS, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(NODES - 1):
        made.add_node(num_cpus=3, num_gpus=GPUS)
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


def place(bundles: int, gpus: int, env: dict[str, str]) -> list[Slot]:
    group = reserve([{"CPU": 1, "GPU": gpus}] * bundles, "test", DEADLINE_S)
    try:
        return find_slots(group, bundles, gpus, DEADLINE_S, env)
    finally:
        release(group)


def test_ranks_are_sorted_by_node_and_device(cluster: Cluster) -> None:
    slots = place(NODES * GPUS, 1, {})
    by_node = [list(same) for _, same in groupby(slots, lambda s: s.node_id)]
    assert [len(same) for same in by_node] == [GPUS] * NODES  # each node's ranks stand together
    for same in by_node:
        # Ray masks the others, so that each process sees one GPU, with index 0.
        assert [slot.gpu_indices for slot in same] == [(0,)] * GPUS
        assert [slot.gpu_ids for slot in same] == [(str(i),) for i in range(GPUS)]
    assert rank_order(slots[::-1]) == list(range(len(slots)))[::-1]


def test_a_tp_group_stays_inside_a_node(cluster: Cluster) -> None:
    slots = place(NODES, 2, {NOSET: "1"})
    assert len({slot.node_id for slot in slots}) == NODES
    assert all(sorted(slot.gpu_indices) == [0, 1] for slot in slots)  # unmasked: all are seen


def test_a_tp_group_larger_than_a_node_is_never_split(cluster: Cluster) -> None:
    with pytest.raises(PlacementError, match=r"INFEASIBLE|PENDING"):
        reserve([{"CPU": 1, "GPU": GPUS + 1}], "too wide", 3.0)


def test_the_doctor_sees_every_node(cluster: Cluster) -> None:
    nodes = examine_cluster(cluster.address)
    assert len(nodes) == NODES
    for node in nodes:
        assert node.backends["gloo"] == []
        assert node.versions["ray"] == ray.__version__
        assert node.shm_bytes > 0


def test_one_machine_is_watched_once(cluster: Cluster) -> None:
    observer = Observer()
    try:
        with observer.watch():
            pass
        assert len(observer.grown) == 1  # four nodes share an address, and its counters
        assert {r.name for r in observer.take()} >= {"load_1min", "rx_bytes"}
        assert observer.take() == []
    finally:
        observer.close()


def test_what_was_watched_survives_an_error(cluster: Cluster) -> None:
    observer = Observer()
    try:
        with pytest.raises(RuntimeError), observer.watch():
            raise RuntimeError("the trial failed")
        assert observer.take()
    finally:
        observer.close()


def test_a_dead_sampler_does_not_fail_the_trial(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    observer = Observer()
    try:
        with observer.watch():
            for sampler in (observer._samplers or {}).values():
                ray.kill(sampler)
        assert observer.take() == []
        assert "no telemetry" in caplog.text
        with observer.watch():
            pass
        assert observer.grown == {}
    finally:
        observer.close()
