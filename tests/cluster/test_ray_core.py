"""Session, placement and watchdog on a real Ray cluster with pretended GPUs."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import Cluster
from ep_ray.inventory import local_machine
from ep_ray.placement import PlacementError, find_slots, release, reserve
from ep_ray.session import NOSET, Session
from ep_ray.watchdog import TrialError, kill_all, stacks, wait_all

DEADLINE_S = 60
SMI = '#!/bin/sh\nfor i in 0 1 2 3; do echo "$i, Pretended GPU, GPU-$i, 1000"; done\n'


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A local cluster that sees GPUs 3 and 2 of four, in this order."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    before = dict(os.environ)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    os.environ["CUDA_VISIBLE_DEVICES"] = "3,2"
    found = Session(Cluster(name="local", gpus=2, cpus=2, dashboard=False), ranks=4)
    try:
        found.start()
        yield found
    finally:
        found.close()
        os.environ.clear()
        os.environ.update(before)
    assert not ray.is_initialized()


@ray.remote(num_cpus=0)
class Worker:
    """An actor that does what a rank may do."""

    def pid(self) -> int:
        return os.getpid()

    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    def fail(self) -> None:
        raise ValueError("no such device")

    def die(self) -> None:
        os._exit(3)

    def stacks(self) -> str:
        return "in wait()"


@pytest.fixture
def workers(session: Session) -> Iterator[list[Any]]:
    found = [Worker.remote() for _ in range(2)]  # type: ignore[attr-defined]
    yield found
    for worker in found:
        ray.kill(worker)


def test_the_node_is_known_with_the_gpus_that_ray_hands_out(session):
    (node,) = session.nodes
    assert node.machine.hostname == local_machine().hostname
    assert [gpu.index for gpu in node.machine.gpus] == [3, 2]
    assert node.node_id == ray.get_runtime_context().get_node_id()
    assert os.environ[NOSET] == "1"
    session.start()
    assert session.nodes == (node,), "a second start does nothing"


def test_a_local_cluster_has_room_for_every_rank(session):
    assert ray.cluster_resources()["CPU"] >= session.ranks
    assert session.dashboard_url is None


def test_ports_that_workers_may_take_are_warned_about(session, caplog):
    (node,) = session.nodes
    if node.worker_ports is None:
        session.check_ports([18000])
        assert caplog.text == ""
    else:
        session.check_ports([node.worker_ports[0]])
        assert "Ray's workers on" in caplog.text


def test_slots_are_in_device_order_with_indices_of_the_visible_list(session):
    group = reserve([{"CPU": 1, "GPU": 1}] * 2, "two", DEADLINE_S)
    try:
        slots = find_slots(group, 2, 1, DEADLINE_S)
    finally:
        release(group)
    assert [(slot.gpu_ids, slot.gpu_indices) for slot in slots] == [(("3",), (0,)), (("2",), (1,))]
    assert {slot.node_ip for slot in slots} == {"127.0.0.1"}
    assert sorted(slot.bundle for slot in slots) == [0, 1]


def test_a_tp_group_has_its_gpus_in_device_order(session):
    group = reserve([{"CPU": 1, "GPU": 2}], "one", DEADLINE_S)
    try:
        (slot,) = find_slots(group, 1, 2, DEADLINE_S)
    finally:
        release(group)
    assert (slot.gpu_ids, slot.gpu_indices) == (("3", "2"), (0, 1))


def test_a_placement_that_cannot_come_says_what_there_is_and_leaves_nothing(session):
    with pytest.raises(PlacementError) as caught:
        reserve([{"CPU": 1, "GPU": 2}] * 2, "ep_ray:big", timeout_s=1)
    assert caught.value.status == "timeout"
    message = caught.value.reason
    assert "placement of ep_ray:big did not come within 1 s (state " in message
    assert "asked for 2 bundles of {'CPU': 1, 'GPU': 2}; free are {'CPU': " in message
    group = reserve([{"CPU": 1, "GPU": 2}], "after", DEADLINE_S)
    release(group)


def test_results_come_in_rank_order(workers):
    refs = [workers[0].wait.remote(0.3), workers[1].pid.remote()]
    first, second = wait_all(refs, DEADLINE_S, "both")
    assert first == "done"
    assert isinstance(second, int)


def test_a_missed_deadline_is_a_timeout(workers):
    with pytest.raises(TrialError) as caught:
        wait_all([workers[0].wait.remote(60)], 0.5, "the barrier")
    assert (caught.value.status, caught.value.reason) == (
        "timeout", "the barrier: no answer within 0.5 s",
    )  # fmt: skip


def test_the_first_failure_ends_the_wait_for_ranks_that_hang(workers):
    started = time.monotonic()
    with pytest.raises(TrialError) as caught:
        wait_all([workers[0].wait.remote(3600), workers[1].fail.remote()], 3600, "setup")
    assert (caught.value.status, caught.value.reason) == (
        "failed", "setup: rank 1: no such device",
    )  # fmt: skip
    assert time.monotonic() - started < DEADLINE_S


def test_a_process_that_dies_is_a_crash(workers):
    with pytest.raises(TrialError) as caught:
        wait_all([workers[0].wait.remote(3600), workers[1].die.remote()], 3600, "dispatch")
    assert caught.value.status == "crash"
    assert caught.value.reason.startswith("dispatch: rank 1 died")


def test_stacks_of_those_that_answer(workers):
    wait_all([worker.pid.remote() for worker in workers], DEADLINE_S, "start")
    workers[1].wait.remote(60)
    text = stacks(workers, timeout_s=3.0)
    assert text == "rank 0:\nin wait()\nrank 1: no answer"


def test_killed_actors_are_gone_when_the_call_returns(session):
    actors = [Worker.remote() for _ in range(2)]  # type: ignore[attr-defined]
    pids = wait_all([actor.pid.remote() for actor in actors], DEADLINE_S, "pids")
    actors[0].wait.remote(3600)
    assert kill_all(actors, {ray.get_runtime_context().get_node_id(): pids}) == []
    alive = [pid for pid in pids if psutil.pid_exists(pid)]
    assert all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in alive)


def test_a_cluster_that_is_not_there(session, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", _refuse)
    with pytest.raises(ConfigError) as caught:
        Session(Cluster(name="x", address="10.0.0.1:6379"), ranks=1).start()
    assert "Ray could not use 10.0.0.1:6379 (cluster.address=10.0.0.1:6379)" in str(caught.value)
    assert "`ray status` must answer here" in str(caught.value)


def _refuse(**_: object) -> None:
    raise ConnectionError("nobody there")


def test_what_workers_import_does_not_depend_on_their_folder(session):
    assert all(Path(entry).is_absolute() for entry in os.environ["PYTHONPATH"].split(os.pathsep))
