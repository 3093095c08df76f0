"""Runs all-to-all trials on warm ranks: actors and communicators stay up between trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from ep_ray.a2a.procedure import TrialResult
from ep_ray.a2a.rank import Membership, RankActor, Report
from ep_ray.address import is_one_node
from ep_ray.config.schema import Config, DeviceKind, RoutingKind, TransportKind
from ep_ray.interrupt import uninterrupted
from ep_ray.observer import Observer
from ep_ray.placement import Slot, find_slots, in_bundle, release, reserve
from ep_ray.proof import counter_evidence, link_evidence
from ep_ray.session import NOSET
from ep_ray.transport import PEER, evidence_in_log, transport_env
from ep_ray.watchdog import TrialError, kill_all, stacks, wait_all
from sweeps.a2a_point import procedure_of, read_table, refuse, shares_gpu, spec_of
from sweeps.outcome import Outcome, what_ran
from sweeps.prove import prove
from sweeps.trial import A2aTrial

_COMMUNICATOR = {DeviceKind.cpu: "gloo", DeviceKind.cuda: "nccl"}


@dataclass
class _Ranks:
    """Actors in rank order, and what they say of themselves."""

    group: Any
    actors: list[Any]
    facts: list[dict[str, Any]]
    joined: int = 0  # ranks of the communicator that stands; 0 for none


class A2aHost:
    """Ranks for a run of all-to-all trials that share device and transport.

    Args:
        config: The experiment.
        device: `cpu` or `cuda`.
        ranks: Most ranks that a trial of this host needs; smaller ones use the first ranks.
        label: Distinguishes this sweep's temporary files.
        observer: Watches the machines while a trial runs.
    """

    def __init__(
        self, config: Config, device: DeviceKind, ranks: int, label: str, observer: Observer
    ) -> None:
        self._config = config
        self._observer = observer
        self._device = device
        self._size = ranks
        self._label = label
        self._ranks: _Ranks | None = None
        self._table: tuple[Any, str] | None = None  # in Ray's object store, and its digest

    def run(self, trial: A2aTrial) -> Outcome:
        """Runs one trial. A failure ends all ranks; the next trial gets new ones.

        Raises:
            TrialError: Timeout, crash, an error of a rank, or what was asked cannot be.
        """
        refuse(self._config, trial, self._device)
        self._table_of(trial)  # a file that has gone ends no ranks
        try:
            ranks = self._ready(trial)
            return self._measure(trial, ranks)
        except BaseException as error:
            with uninterrupted():
                self._explain_and_kill(error)
            raise

    def close(self) -> list[str]:
        """Ends the ranks: in order if they answer, else by force. Returns what is left."""
        if self._ranks is None:
            return []
        leaving = [actor.leave.remote() for actor in self._ranks.actors]
        ray.wait(leaving, num_returns=len(leaving), timeout=self._config.deadlines.teardown_s)
        return self._kill()

    def _table_of(self, trial: A2aTrial) -> tuple[Any, str | None]:
        """The real choices in Ray's object store, and their digest; read once."""
        if trial.routing is not RoutingKind.file:
            return None, None
        if self._table is None:
            table = read_table(self._config)
            self._table = ray.put(table.topk_idx), table.digest
        return self._table

    def _ready(self, trial: A2aTrial) -> _Ranks:
        ranks = self._ranks or self._start(trial)
        if ranks.joined != trial.ep:
            ranks.joined = 0
            self._join(ranks.actors[: trial.ep])
            ranks.joined = trial.ep
        return ranks

    def _start(self, trial: A2aTrial) -> _Ranks:
        shared = self._config.cluster.ranks_per_gpu
        gpus = 1 / shared if self._device is DeviceKind.cuda else 0
        bundle: dict[str, float] = {"CPU": 1, **({"GPU": gpus} if gpus else {})}
        deadlines = self._config.deadlines
        group = reserve(
            [bundle] * self._size, "ep_ray:a2a", self._config.cluster.placement_timeout_s
        )
        self._ranks = _Ranks(group, [], [])
        slots = find_slots(group, self._size, gpus, deadlines.actor_start_s, self._unmask(gpus))
        for rank, slot in enumerate(slots):
            self._ranks.actors.append(self._actor(group, rank, slot, gpus, trial))
        refs = [actor.facts.remote() for actor in self._ranks.actors]
        self._ranks.facts = wait_all(refs, deadlines.actor_start_s, "start of the ranks")
        if shared == 1:
            _refuse_shared_gpus(self._ranks.facts)
        return self._ranks

    def _actor(self, group: Any, rank: int, slot: Slot, gpus: float, trial: A2aTrial) -> Any:
        env = transport_env(trial.transport, f"{self._label}-rank{rank}", is_one_node())
        env["NCCL_DEBUG_FILE"] = f"/tmp/ep_ray-{self._label}-nccl-rank{rank}.log"
        options = in_bundle(group, slot.bundle, gpus)
        if unmask := self._unmask(gpus):
            options["runtime_env"] = {"env_vars": unmask}
        actor = RankActor.options(**options, name=f"rank:{self._label}:{rank}")
        masked = gpus and self._config.cluster.mask_gpus
        index = (0 if masked else slot.gpu_indices[0]) if gpus else None
        return actor.remote(index, env)

    def _unmask(self, gpus: float) -> dict[str, str]:
        """What Ray itself must read before it starts a rank."""
        cluster = self._config.cluster
        # The nodes of a cluster that runs already do not have this driver's environment.
        unmask = gpus and cluster.address is not None and not cluster.mask_gpus
        return {NOSET: "1"} if unmask else {}

    def _join(self, actors: Sequence[Any]) -> None:
        deadline = self._config.deadlines.communicator_s
        what = f"communicator of {len(actors)} ranks"
        store = actors[0].serve_store.remote(len(actors))
        host, port = wait_all([store], deadline, what)[0]
        members = [
            Membership(rank, len(actors), host, port, _COMMUNICATOR[self._device])
            for rank in range(len(actors))
        ]
        joins = [a.join.remote(m, deadline) for a, m in zip(actors, members, strict=True)]
        wait_all(joins, deadline, what)

    def _measure(self, trial: A2aTrial, ranks: _Ranks) -> Outcome:
        actors = ranks.actors[: trial.ep]
        spec = spec_of(self._config, trial, self._device)
        procedure, backend = procedure_of(self._config, trial), trial.backend
        table, digest = self._table_of(trial)
        with self._observer.watch():
            runs = [
                actor.run.remote(spec, procedure, backend.name, backend.options, table)
                for actor in actors
            ]
            reports: list[Report] = wait_all(
                runs, self._config.deadlines.trial_s, f"trial {trial.cell}"
            )
        results = [report.result for report in reports]
        errors = sorted({result.error for result in results if result.error})
        outcome = Outcome(status="failed" if errors else "ok", error="; ".join(errors) or None)
        outcome.rows["operations"] = [] if errors else results[0].operations
        outcome.rows["samples"] = _samples(results)
        outcome.facts |= {
            "routing_digest": digest,
            "timed_unix_ns": results[0].timed_unix_ns,
            "timed_ns": results[0].timed_ns,
        }
        facts = ranks.facts[: trial.ep]
        self._prove(outcome, trial, facts, reports)
        outcome.facts |= {"shared_gpu": shares_gpu(self._config, trial, self._device)} | what_ran(
            facts[0]["versions"],
            _hardware(facts),
            {str(rank): f["env"] for rank, f in enumerate(facts)},
            facts[0]["gpu_name"] or facts[0]["machine"]["cpu"],
        )
        return outcome

    def _prove(
        self,
        outcome: Outcome,
        trial: A2aTrial,
        facts: Sequence[dict[str, Any]],
        reports: Sequence[Report],
    ) -> None:
        asked = trial.transport.kind
        evidence = [
            e for rank, report in enumerate(reports) for e in evidence_in_log(rank, report.nccl_log)
        ]
        if any(e.transport == PEER for e in evidence):
            linked = self._observer.linked_by_nvlink()
            evidence += link_evidence(evidence, [f["env"] for f in facts], linked)
        # CPU ranks talk over sockets, whatever is asked.
        counted = TransportKind.tcp if self._device is DeviceKind.cpu else asked
        expected = _sent_bytes(reports[0].result) if outcome.rows["operations"] else 0
        also = "the correctness check, the measurement of the links, and Ray"
        evidence += counter_evidence(counted, self._observer.grown, expected, also)
        prove(outcome, asked, evidence, crosses=trial.ep > 1, local_links=False)

    def _explain_and_kill(self, error: BaseException) -> None:
        timed_out = isinstance(error, TrialError) and error.status == "timeout"
        text = stacks(self._ranks.actors) if self._ranks and timed_out else ""
        left = [f"left behind: {what}" for what in self._kill()]
        if isinstance(error, TrialError):
            error.reason = "\n".join(filter(None, [error.reason, text, *left]))

    def _kill(self) -> list[str]:
        if self._ranks is None:
            return []
        processes: dict[str, list[int]] = {}
        for fact in self._ranks.facts:
            processes.setdefault(fact["node_id"], []).append(fact["pid"])
        left = kill_all(self._ranks.actors, processes)
        release(self._ranks.group)
        self._ranks = None
        return left


def _hardware(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each machine once, and which rank sits where."""
    ranks = [{k: f[k] for k in ("hostname", "node_id", "gpu_index", "gpu_uuid")} for f in facts]
    return {"machines": {f["hostname"]: f["machine"] for f in facts}, "ranks": ranks}


def _refuse_shared_gpus(facts: Sequence[dict[str, Any]]) -> None:
    """Two ranks on one GPU would measure each other (verl#161)."""
    by_uuid: dict[str, int] = {}
    for rank, fact in enumerate(facts):
        uuid = fact["gpu_uuid"]
        if uuid is None:
            continue
        if uuid in by_uuid:
            raise TrialError(
                "failed",
                f"ranks {by_uuid[uuid]} and {rank} share GPU {uuid}: every rank needs its own; "
                "check CUDA_VISIBLE_DEVICES of the Ray nodes and cluster.mask_gpus",
            )
        by_uuid[uuid] = rank


def _samples(results: Sequence[TrialResult]) -> pa.Table:
    """All ranks' timings as columns of the `samples` table."""
    columns = zip(*(result.samples.columns() for result in results), strict=True)
    names = ("op", "role", "rank", "iteration", "duration_ns")
    return pa.table({n: np.concatenate(c) for n, c in zip(names, columns, strict=True)})


def _sent_bytes(result: TrialResult) -> int:
    """What all timed iterations, warm-up too, must have moved over the wire."""
    timed = result.samples.op[result.samples.role != "floor"]
    return sum(
        int(row["wire_bytes_total"] or 0) * row["loop"] * int((timed == row["op"]).sum())
        for row in result.operations
    )
