"""Four faked nodes of one machine: placement, rank order, the doctor and the observer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import pytest
import ray
from ray.cluster_utils import Cluster

from ep_ray.observer import Observer
from ep_ray.placement import PlacementError, Slot, find_slots, rank_order, release, reserve
from sweeps.doctor.node import examine_cluster

NODES, GPUS = 4, 4
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Nodes that claim four GPUs each; nothing here touches one."""
    # The dashboard's process would only cost memory and start-up time.
    head = {"num_cpus": 6, "num_gpus": GPUS, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(NODES - 1):
        made.add_node(num_cpus=6, num_gpus=GPUS)
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


def place(bundles: int, gpus: int) -> list[Slot]:
    group = reserve([{"CPU": 1, "GPU": gpus}] * bundles, "test", DEADLINE_S)
    try:
        return find_slots(group, bundles, gpus, DEADLINE_S)
    finally:
        release(group)


def test_ranks_are_sorted_by_node_and_device(cluster: Cluster) -> None:
    slots = place(NODES * GPUS, 1)
    nodes = [(node_id, len(list(same))) for node_id, same in groupby(slots, lambda s: s.node_id)]
    assert [count for _, count in nodes] == [GPUS] * NODES  # each node's ranks stand together
    assert len({node_id for node_id, _ in nodes}) == NODES
    for _, same in groupby(slots, lambda s: s.node_id):
        assert [slot.gpu_indices for slot in same] == [(i,) for i in range(GPUS)]
    assert rank_order(slots[::-1]) == list(range(len(slots)))[::-1]


def test_a_tp_group_stays_inside_a_node(cluster: Cluster) -> None:
    slots = place(NODES * 2, 2)
    assert len({slot.node_id for slot in slots}) == NODES
    assert all(len(set(slot.gpu_indices)) == 2 for slot in slots)
    taken = [(slot.node_id, index) for slot in slots for index in slot.gpu_indices]
    assert len(set(taken)) == NODES * GPUS


def test_a_tp_group_larger_than_a_node_is_never_split(cluster: Cluster) -> None:
    with pytest.raises(PlacementError, match="INFEASIBLE|PENDING"):
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
