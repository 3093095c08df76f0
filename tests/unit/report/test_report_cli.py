"""The report's command line, its depths, and its reading of folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sweeps
from ep_ray.report import main
from sweeps.read import ResultsError, load
from sweeps.report import of_results
from sweeps.tables import TABLES


def test_a_sweep_is_printed_and_written_into_its_folder(
    results: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.trial("w", shape="32/16", concurrency=1, requests=1)
    results.serving("w", [results.request(0, [12.5, 20], [1, 1])], wall_ns=10**9)
    folder = results.write(tmp_path / "sweep")
    assert main([str(folder), "--published", "external_dp"]) == 0
    printed = capsys.readouterr().out
    assert "12.500" in printed
    assert f"{folder / 'report.md'} (everything)" in printed
    assert "| c1 | wide\\_tp | 1/1 | 12.500 |" in (folder / "report.md").read_text(encoding="utf-8")


def test_markdown_goes_where_it_was_asked_for(
    results: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.trial("w", status="failed", error="no GPU", shape="32/16", concurrency=1)
    folder = results.write(tmp_path / "sweep")
    assert main([str(folder), "--markdown", str(tmp_path / "here.md")]) == 0
    assert "no GPU" in (tmp_path / "here.md").read_text(encoding="utf-8")
    assert not (folder / "report.md").exists()
    assert main([str(folder), "--markdown", str(tmp_path / "no" / "where.md")]) == 2
    assert "cannot write the Markdown" in capsys.readouterr().err


def test_published_is_printed_and_written_only_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["published", "--markdown", str(tmp_path / "p.md")]) == 0
    assert "20 of 20 are equal" in capsys.readouterr().out
    assert "| EP64 | crash |" in (tmp_path / "p.md").read_text(encoding="utf-8")


def test_the_module_runs_from_anywhere_and_survives_a_closed_pipe(tmp_path: Path) -> None:
    tree = str(Path(sweeps.__file__).parents[1])
    command = f"'{sys.executable}' -m ep_ray.report published | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": tree},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "Published results\n", "")


def test_a_missing_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nope")]) == 2
    error = capsys.readouterr().err
    assert "no such folder" in error
    assert "nope" in error


def test_a_folder_of_results_folders_says_which_ones(results: Any, tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"no trials.parquet. Give a folder that"):
        load(tmp_path)
    results.write(tmp_path / "b")
    results.write(tmp_path / "a")
    with pytest.raises(ResultsError, match="These folders in it are: a, b"):
        load(tmp_path)


def test_another_schema_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    other = TABLES["trials"].with_metadata({"ep_ray_schema_version": "99"})
    pq.write_table(other.empty_table(), tmp_path / "trials.parquet")
    with pytest.raises(ResultsError, match="schema version 99, this ep-ray reads version 1"):
        load(tmp_path)
    pq.write_table(other.with_metadata(None).empty_table(), tmp_path / "trials.parquet")
    with pytest.raises(ResultsError, match="schema version none"):
        load(tmp_path)


def test_a_broken_or_incomplete_file_is_named(results: Any, tmp_path: Path) -> None:
    results.write(tmp_path)
    (tmp_path / "samples.parquet").write_bytes(b"not parquet")
    with pytest.raises(ResultsError, match=r"samples.parquet' is not a readable Parquet file"):
        load(tmp_path)
    fields = [f for f in TABLES["samples"] if f.name != "rank"]
    cut = pa.schema(fields, metadata=TABLES["samples"].metadata)
    pq.write_table(cut.empty_table(), tmp_path / "samples.parquet")
    with pytest.raises(ResultsError, match="lacks the columns rank"):
        load(tmp_path)


def test_absent_tables_are_empty_and_rows_without_a_trial_are_dropped(
    results: Any, tmp_path: Path
) -> None:
    results.trial("known")
    results.add("samples", "known", rank=0)
    results.add("samples", "unfinished", rank=1)
    tables = load(results.write(tmp_path))
    assert tables["samples"]["rank"].to_pylist() == [0]
    assert tables["ledger"].num_rows == 0
    assert tables["ledger"].schema.equals(TABLES["ledger"])


def test_a_sweep_without_trials_says_so(
    results: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(results.write(tmp_path))]) == 0
    assert "No trial has ended yet." in capsys.readouterr().out


def test_the_terminal_gets_the_brief_report_and_the_file_everything(
    results: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "engine 0 gave no token\nTraceback of the engine\nRuntimeError"
    results.trial("w", status="crash", error=reason, shape="32/16", concurrency=1)
    folder = results.write(tmp_path / "sweep")
    assert main([str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "1 trials of wide_tp: 1 FAILED" in printed
    assert "engine 0 gave no token ..." in printed
    assert "RuntimeError" not in printed
    assert "How it was measured" not in printed
    assert f"```text\n{reason}\n```" in (folder / "report.md").read_text(encoding="utf-8")
    assert main([str(folder), "--full"]) == 0
    printed = capsys.readouterr().out
    assert "RuntimeError" in printed
    assert "How it was measured" in printed


def test_a_sweep_without_trouble_has_no_empty_sections(results: Any, tmp_path: Path) -> None:
    results.trial("w", transport_asked="auto", transport_status="observed", shape="32/16")
    results.serving("w", [results.request(0, [10, 20], [1, 1])], wall_ns=10**9)
    report = of_results(results.write(tmp_path))
    assert "all ended well, no request failed, no flags." in str(report.brief[0].blocks)
    for sections in (report.brief, report.full):
        titles = {section.title for section in sections}
        assert not titles & {"Failed trials", "Failed requests", "Flags"}
