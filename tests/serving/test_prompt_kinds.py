"""Each kind of prompts from the command line to the server and the tables, on loopback."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.serving.openai_server import Habits, openai_server

DEADLINE_S = 240
SMALL = [
    "load.concurrency=[1,2]", "load.min_requests=3", "load.requests_per_slot=1",
    "load.warmups=1", "cluster.dashboard=false", "model.vocab_size=1000",
]  # fmt: skip


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ep_ray.sweep", "+exp=attached", *SMALL, *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def measured(
    folder: Path, *overrides: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Rows of `trials`, what the server was sent but for the probes, and what was printed."""
    habits = Habits()
    with openai_server(habits) as url:
        done = sweep(folder, f"arm.url={url}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = (folder / "runs").iterdir()
    sent = [body for body in habits.bodies if body["max_tokens"] != 2]
    return pq.read_table(results / "trials.parquet").to_pylist(), sent, done.stdout


def test_a_shared_prefix_reaches_the_server(tmp_path):
    rows, bodies, printed = measured(
        tmp_path,
        "load.shapes=[12/4]",
        "load.prompts=shared_prefix",
        "load.shared_prefix_tokens=8",
    )
    assert [(row["status"], row["prompts"]) for row in rows] == [("ok", "shared_prefix")] * 2
    prompts = [tuple(body["prompt"]) for body in bodies]
    assert len(set(prompts)) == len(prompts) == 2 * (3 + 1) + 1
    assert len({prompt[:8] for prompt in prompts}) == 2, "one prefix a cell"
    assert "the first 8 tokens are the same in all of a cell" in printed


def test_text_reaches_the_server_and_may_end_by_itself(tmp_path):
    rows, bodies, printed = measured(
        tmp_path, "load.shapes=[12/4]", "load.prompts=text", "load.ignore_eos=false"
    )
    assert [(row["status"], row["prompts"]) for row in rows] == [("ok", "text")] * 2
    assert {len(body["prompt"].split()) for body in bodies} == {12}
    assert len({body["prompt"].split()[0] for body in bodies}) == len(bodies)
    assert not {"ignore_eos", "min_tokens"} & set().union(*bodies)
    assert "random words with a marker of their own" in printed


def test_a_prefix_without_a_length_is_refused_before_anything_starts(tmp_path):
    done = sweep(
        tmp_path, "arm.url=http://127.0.0.1:1", "load.shapes=[12/4]", "load.prompts=shared_prefix"
    )
    assert done.returncode != 0
    assert "`load.shared_prefix_tokens=0`: load.prompts=shared_prefix needs" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_conversations_reach_the_server_with_the_lengths_of_their_replies(tmp_path):
    turns = [("a cat?", "x" * 20), ("a dog?", "x" * 28)]
    talks = [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": r}]}
        for q, r in turns
    ]
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    rows, bodies, printed = measured(
        tmp_path, "load.shapes=[file/file]", "load.prompts=conversations", "load.file=talks.json"
    )
    digest = hashlib.sha256((tmp_path / "talks.json").read_bytes()).hexdigest()
    assert [row["cell"] for row in rows] == ["file-file-c1", "file-file-c2"]
    assert {(r["status"], r["prompts"], r["prompts_digest"]) for r in rows} == {
        ("ok", "conversations", digest)
    }
    assert len(bodies) == 2 * (3 + 1) + 1
    asked = {(body["prompt"].split(" ", 1)[1], body["max_tokens"]) for body in bodies}
    assert asked == {("a cat?", 5), ("a dog?", 7)}
    assert len({body["prompt"].split()[0] for body in bodies}) == len(bodies)
    assert f"SHA-256 {digest}" in " ".join(printed.split())


def test_a_broken_file_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "talks.json").write_text('[{"conversations": []},\n7]')
    with openai_server(Habits()) as url:
        done = sweep(
            tmp_path,
            f"arm.url={url}",
            "load.shapes=[file/file]",
            "load.prompts=conversations",
            "load.file=talks.json",
        )
    assert done.returncode != 0
    assert "`load.file=talks.json`, line 2: asked an object with" in done.stderr
    assert not (tmp_path / "runs").exists()


TRACE = [
    {"timestamp": at, "input_length": 520 + i, "output_length": 3 + i, "hash_ids": [0, 1 + i]}
    for i, at in enumerate((0, 0, 900, 1000))
]


def test_a_trace_reaches_the_server_at_its_own_times(tmp_path):
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, TRACE)))
    given = ["load.shapes=[file/file]", "load.prompts=trace", "load.file=trace.jsonl"]
    open_loop = ["load.arrival=trace", "load.rate=[4]", "load.duration_s=1"]
    rows, bodies, printed = measured(tmp_path, *given, *open_loop)
    ((kind, arrival, cell, status),) = [
        (row["prompts"], row["arrival"], row["cell"], row["status"]) for row in rows
    ]
    assert (kind, arrival, cell, status) == ("trace", "trace", "file-file-q4", "ok")
    prompts = [body["prompt"] for body in bodies][-4:]  # after calibration and warm-up
    assert sorted(map(len, prompts)) == [520, 521, 522, 523]
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert "lengths and shared blocks of trace.jsonl" in " ".join(printed.split())
    (results,) = (tmp_path / "runs").iterdir()
    requests = pq.read_table(results / "requests.parquet").to_pylist()
    due = sorted(row["intended_ns"] for row in requests if row["role"] == "measured")
    # 3 gaps at 4 requests per second: 0.75 s for what took 1 s in the trace.
    assert [at - due[0] for at in due] == [0, 0, 675_000_000, 750_000_000]


def test_a_server_that_takes_no_ids_is_refused_a_trace(tmp_path):
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, TRACE)))
    given = ["load.shapes=[file/file]", "load.prompts=trace", "load.file=trace.jsonl"]
    with openai_server(Habits(token_ids=False)) as url:
        done = sweep(tmp_path, f"arm.url={url}", *given)
    assert done.returncode != 0
    assert "asked: load.prompts=trace, which is token ids; found:" in done.stderr
    assert "refuses them" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_kind_that_does_not_exist_lists_those_that_do(tmp_path):
    done = sweep(tmp_path, "arm.url=http://127.0.0.1:1", "load.prompts=songs")
    assert done.returncode != 0
    assert "shared_prefix" in done.stderr
