"""`RankActor` in a real local Ray cluster over gloo on the loopback interface."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from ep_ray.a2a.procedure import Procedure
from ep_ray.a2a.rank import Membership, RankActor, assemble
from ep_ray.a2a.stats import concat, headline_ns
from ep_ray.backends.base import Spec
from tests.local_ray import local_ray

DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(4):
        yield


@pytest.fixture(scope="module")
def actors(cluster: None) -> list[Any]:
    return [RankActor.remote() for _ in range(4)]


def spec(ep: int) -> Spec:
    return Spec(ep=ep, tokens=16, hidden=256, experts=16, topk=2)


def run(actors: list[Any], procedure: Procedure) -> list[Any]:
    return [actor.run.remote(spec(len(actors)), procedure, "gloo", {}) for actor in actors]


def wait_for(true: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_facts_tell_where_each_rank_runs(actors: list[Any]) -> None:
    facts = ray.get([actor.facts.remote() for actor in actors], timeout=DEADLINE_S)
    assert len({fact["pid"] for fact in facts}) == 4
    assert {fact["node_id"] for fact in facts} == {ray.get_runtime_context().get_node_id()}
    assert facts[0]["gpu_uuid"] is None


def test_a_rank_without_a_communicator_says_so(actors: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="call `join` before `run`"):
        ray.get(run(actors[:1], Procedure(1)), timeout=DEADLINE_S)


def test_groups_of_several_sizes_on_the_same_actors(actors: list[Any]) -> None:
    for ep in (4, 2, 1, 4):
        assemble(actors[:ep], "gloo", DEADLINE_S)
        for _ in range(2):  # the communicator stays up between trials
            refs = run(actors[:ep], Procedure(iterations=3, max_warmup=20))
            results = [report.result for report in ray.get(refs, timeout=DEADLINE_S)]
            assert [(result.rank, result.error) for result in results] == [
                (rank, None) for rank in range(ep)
            ]
            assert headline_ns(concat([result.samples for result in results]), "pair") > 0


def test_a_group_of_the_wrong_size_is_refused(actors: list[Any]) -> None:
    assemble(actors[:2], "gloo", DEADLINE_S)
    ref = actors[0].run.remote(spec(4), Procedure(1), "gloo", {})
    with pytest.raises(ValueError, match="EP4 was asked of a group of 2 ranks"):
        ray.get(ref, timeout=DEADLINE_S)


def test_a_missing_peer_ends_at_the_deadline(cluster: None) -> None:
    actor = RankActor.remote()
    host, port = ray.get(actor.serve_store.remote(2), timeout=DEADLINE_S)
    member = Membership(0, 2, host, port, "gloo")
    with pytest.raises(ray.exceptions.RayTaskError, match="timeout"):
        ray.get(actor.join.remote(member, 1.0), timeout=DEADLINE_S)
    with pytest.raises(RuntimeError, match="kill this actor and start a new one"):
        ray.get(actor.join.remote(member, 1.0), timeout=DEADLINE_S)
    ray.kill(actor)


def test_a_dead_peer_leaves_ranks_that_answer_and_can_be_killed(actors: list[Any]) -> None:
    assemble(actors, "gloo", DEADLINE_S)
    pids = [fact["pid"] for fact in ray.get([a.facts.remote() for a in actors])]
    endless = Procedure(iterations=10**9, max_warmup=20)
    refs = run(actors, endless)
    wait_for(
        lambda: "_time_all" in ray.get(actors[0].stacks.remote(), timeout=DEADLINE_S),
        "rank 0 times",
    )
    ray.kill(actors[3])
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(refs[3], timeout=DEADLINE_S)
    for actor in actors[:3]:
        assert "thread MainThread" in ray.get(actor.stacks.remote(), timeout=DEADLINE_S)
        ray.kill(actor)
    wait_for(lambda: not any(map(alive, pids)), "all ranks are gone")
