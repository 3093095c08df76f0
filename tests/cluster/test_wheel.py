"""The wheel: built, installed into a folder, and used from another one without the checkout."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240
WHERE = """
import ep_ray.sweep, serving.load.target, sweeps.plan
from ep_ray.config.folder import config_dir
print(ep_ray.__file__, serving.__file__, sweeps.__file__, config_dir(), sep="\\n")
"""


def call(*command: object, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", out, ROOT)
    done = call(*command, folder=out)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed; its dependencies come from this Python."""
    target = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
    done = call(*pip, "--target", target, wheel, folder=target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def installed(site: Path, folder: Path, *command: object, **environ: str) -> str:
    """Standard output of a command that finds the installed wheel before everything else."""
    done = call(*command, folder=folder, PYTHONPATH=str(site), **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configs_and_published_tables_are_inside(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("conf", "ep_ray/conf"), ("sweeps/published", "sweeps/published")):
        files = [p for p in (ROOT / folder).rglob("*") if p.suffix in (".yaml", ".csv")]
        assert files
        assert {f"{inside}/{p.relative_to(ROOT / folder).as_posix()}" for p in files} <= names
    assert {"ep_ray/py.typed", "serving/py.typed", "sweeps/py.typed"} <= names


def test_nothing_else_is_inside(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "ep_ray",
        "serving",
        "sweeps",
    }


def test_entry_points(site):
    (info,) = site.glob("ep_ray-*.dist-info")
    found = {(e.group, e.name): e.value for e in PathDistribution(info).entry_points}
    expected = {
        ("console_scripts", "ep-ray-sweep"): "ep_ray.sweep:main",
        ("console_scripts", "ep-ray-report"): "ep_ray.report:main",
        ("vllm.general_plugins", "ep_ray_cpu_collectives"): "serving.vllm_cpu_plugin:register",
    }
    assert expected.items() <= found.items()
    for target in found.values():
        module, _, name = target.partition(":")
        text = (site / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {name}(" in text
    assert os.access(site / "bin" / "ep-ray-sweep", os.X_OK)
    assert os.access(site / "bin" / "ep-ray-report", os.X_OK)


def test_the_installed_packages_are_used_and_find_their_configs(site, tmp_path):
    files = installed(site, tmp_path, sys.executable, "-c", WHERE).split()
    assert files == [
        *(str(site / name / "__init__.py") for name in ("ep_ray", "serving", "sweeps")),
        str(site / "ep_ray" / "conf"),
    ]


def test_a_plan_is_printed_and_nothing_is_left(site, tmp_path):
    command = (sys.executable, "-m", "ep_ray.sweep", "+exp=quickstart", "plan_only=true")
    assert "quickstart: 16 trials on cpu" in installed(site, tmp_path, *command)
    assert list(tmp_path.iterdir()) == []


def test_the_published_tables_are_printed(site, tmp_path):
    out = installed(site, tmp_path, site / "bin" / "ep-ray-report", "published", COLUMNS="200")
    with open(ROOT / "sweeps" / "published" / "external_dp.csv", encoding="utf-8") as file:
        rates = [row["output_tok_per_s"] for row in csv.DictReader(file)]
    shown = out.replace(",", "")
    assert len(rates) == 36
    assert [rate for rate in rates if rate not in shown] == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ep-ray-sweep +exp=ext", ["+exp=external_dp_rdma", "+exp=external_dp_tcp"]),
        ("ep-ray-sweep load=", ["load=published", "load=quick"]),
        ("ep-ray-sweep +exp=quickstart load.min", ["load.min_requests="]),
    ],
)
def test_the_shell_completes_words(site, tmp_path, line, words):
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    script = site / "bin" / "ep-ray-sweep"
    assert installed(site, tmp_path, script, "-sc", "query=bash", **asked).split() == words


def test_the_shell_is_told_how_to_complete(site, tmp_path):
    out = installed(site, tmp_path, site / "bin" / "ep-ray-sweep", "-sc", "install=bash")
    assert "complete -o nospace -o default -F" in out
    assert "ep-ray-sweep" in out
