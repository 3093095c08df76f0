"""Reading a configuration is light: no ray, no torch, no vllm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 120
HEAVY = {"ray", "torch", "vllm", "pyarrow", "transformers"}
COMPOSE = """
import importlib, pkgutil
import ep_ray.config
for module in pkgutil.iter_modules(ep_ray.config.__path__):
    importlib.import_module(f"ep_ray.config.{module.name}")
from ep_ray.config.compose import compose_all
compose_all(["+exp=quickstart", "seed=1,2"], multirun=True)
"""
MAIN = """
import runpy, sys
sys.argv = ["sweep", *{arguments}]
try:
    runpy.run_module("ep_ray.sweep", run_name="__main__")
except SystemExit as end:
    code = end.code
"""
REPORT = "\nimport json, sys\nprint(json.dumps([globals().get('code'), list(sys.modules)]))\n"


def run(script: str, folder: Path) -> tuple[object, set[str], str]:
    """Exit code of the entry, the packages that were imported, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-c", script + REPORT],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=folder,
        check=True,
    )
    *printed, last = done.stdout.splitlines()
    code, modules = json.loads(last)
    return code, {name.split(".")[0] for name in modules}, "\n".join(printed) + done.stderr


def test_composing_imports_nothing_heavy(tmp_path):
    _, packages, _ = run(COMPOSE, tmp_path)
    assert "hydra" in packages
    assert not packages & HEAVY


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "\nexp: a2a_backends, a2a_decode, a2a_graph, a2a_one_gpu"),
        (["+exp=quickstart", "--cfg", "job"], 0, "name: quickstart"),
        (["+exp=quickstart", "arm.tpp=1"], 2, "ep-ray: unknown key `arm.tpp`"),
    ],
)
def test_quick_answers_import_nothing_heavy_and_leave_nothing(arguments, code, says, tmp_path):
    found, packages, printed = run(MAIN.format(arguments=arguments), tmp_path)
    assert found == code
    assert says in printed
    assert not packages & HEAVY
    assert not list(tmp_path.iterdir())
