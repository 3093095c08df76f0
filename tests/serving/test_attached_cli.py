"""`+exp=attached` from the command line to the tables, against a server on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import Config
from sweeps.sweep import Sweep
from sweeps.tables import TABLES
from tests.serving.openai_server import Habits, openai_server

DEADLINE_S = 240
# c = 1 and c = 2, 5 measured requests each, one warm-up a cell and one calibration.
MEASURED, CELLS, SENT = 5, 2, 2 * (5 + 1) + 1
SMALL = [
    "load.shapes=[12/4]", "load.concurrency=[1,2]", "load.min_requests=5",
    "load.requests_per_slot=1", "load.warmups=1", "cluster.dashboard=false",
    "model.vocab_size=1000",
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


@pytest.fixture(scope="module")
def habits() -> Habits:
    return Habits(ranks=2)


@pytest.fixture(scope="module")
def url(habits: Habits) -> Iterator[str]:
    with openai_server(habits) as base:
        yield base


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, url: str) -> tuple[Path, str]:
    """The results folder of a sweep that went well, and what it printed."""
    folder = tmp_path_factory.mktemp("attached")
    done = sweep(folder, f"arm.url={url}", f"arm.rank_urls=[{url}/rank0,{url}/rank1]")
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = (folder / "runs").iterdir()
    return results, done.stdout


@pytest.fixture(scope="module")
def tables(ran: tuple[Path, str]) -> dict[str, pa.Table]:
    return {name: pq.read_table(ran[0] / f"{name}.parquet") for name in TABLES}


def test_every_cell_is_a_trial_that_went_well(tables):
    rows = tables["trials"].to_pylist()
    assert [(r["arm"], r["cell"], r["status"]) for r in rows] == [
        ("attached", "12-4-c1", "ok"), ("attached", "12-4-c2", "ok"),
    ]  # fmt: skip
    for row in rows:
        assert row["prompts"] == "token_ids"
        assert row["transport_status"] == "not_applicable"
        assert (row["tp"], row["dp"], row["ep"]) == (None, None, None)
        versions = json.loads(row["versions_json"])
        assert versions["server"] == "9.9"
        assert "vllm" not in versions, "the client's vLLM is not the server's"
        assert json.loads(row["env_json"]) == {}


def test_every_request_is_recorded_with_its_role(tables, habits):
    rows = tables["requests"].to_pylist()
    assert len(rows) == SENT
    assert Counter(r["role"] for r in rows) == {
        "measured": MEASURED * CELLS, "warmup": CELLS, "calibration": 1,
    }  # fmt: skip
    for row in rows:
        assert (row["state"], row["http_status"], row["finish_reason"]) == (
            "complete",
            200,
            "length",
        )
        assert (row["prompt_tokens"], row["completion_tokens"]) == (5, 4)
        assert row["chunk_tokens"] == [1, 1, 1, 1]
        assert row["sent_ns"] <= row["chunk_ns"][0] <= row["end_ns"]
    prompts = [tuple(body["prompt"]) for body in habits.bodies if len(body["prompt"]) == 12]
    assert len(set(prompts)) == len(prompts) == SENT, "a prompt was sent twice"


def test_cells_were_as_full_as_asked(tables):
    assert tables["cells"]["in_flight_max"].to_pylist() == [1, 2]
    assert all(wall > 0 for wall in tables["cells"]["wall_ns"].to_pylist())


def test_the_ledger_compares_the_sum_of_the_ranks(tables, url):
    rows = [row for row in tables["ledger"].to_pylist() if row["role"] == "all"]
    ranks = [row for row in rows if row["endpoint"].startswith(url)]
    assert {row["endpoint"] for row in ranks} == {f"{url}/rank0", f"{url}/rank1"}
    assert sum(row["engine_complete"] for row in ranks) == SENT
    assert {(row["client_sent"], row["agrees"]) for row in ranks} == {(None, None)}
    together = [row for row in rows if row["endpoint"] == "?"]
    assert [r["client_complete"] for r in together] == [MEASURED + 2, MEASURED + 1]
    assert [r["engine_complete"] for r in together] == [MEASURED + 2, MEASURED + 1]
    assert all(row["agrees"] for row in together)


def test_a_report_and_the_way_back_are_printed(ran):
    results, printed = ran
    assert f"results in {results}" in printed
    assert "12-4-c1" in printed or "12/4" in printed
    assert f"python -m ep_ray.report {results}" in printed
    assert (results / "report.md").stat().st_size > 0


def resumed(results: Path, url: str, *overrides: str) -> tuple[Sweep, Config]:
    ranks = f"arm.rank_urls=[{url}/rank0,{url}/rank1]"
    given = ["+exp=attached", *SMALL, f"arm.url={url}", ranks, f"resume={results}", *overrides]
    points = compose_all(given, multirun=False)
    return Sweep(points), points[0]


def test_what_is_done_is_not_run_again(ran, url, habits, capsys):
    results, _ = ran
    sent = len(habits.bodies)
    again, config = resumed(results, url)
    again.run(config)
    assert again.finish()
    again.close()
    assert not ray.is_initialized()
    assert len(habits.bodies) == sent + 1, "only the probe"
    assert pq.read_table(results / "trials.parquet")["attempt"].to_pylist() == [1, 1]


def test_another_experiment_does_not_resume_it(ran, url):
    with pytest.raises(ConfigError, match="none of its 2 trials is in this experiment"):
        resumed(ran[0], url, "seed=7")
    resumed(ran[0], url)[0].close()  # the refusal left the folder free
