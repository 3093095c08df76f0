"""Rules of the code base that no reader should have to check by eye."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ep_ray", "serving", "sweeps")
# Entries may look up; everything else imports only from the packages to its left.
ENTRIES = {"ep_ray/sweep.py", "ep_ray/report.py", "ep_ray/doctor.py"}
MOST_LINES, MOST_LINES_OF_ENTRY = 300, 100
TEXTS = {".py", ".yaml", ".yml", ".toml", ".md", ".sh", ".txt", ".csv", ""}


def modules() -> list[Path]:
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(found)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[str]:
    """Dotted names of everything a module imports, at its top or inside a function."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            yield ".".join(part for part in (above, node.module) if part)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_point_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    forbidden = PACKAGES[PACKAGES.index(package) + 1 :]
    if name_of(path) not in ENTRIES:
        assert {name for name in imported(path) if name.split(".")[0] in forbidden} == set()


def test_configs_and_adapters_are_imported_late():
    for path in (ROOT / "ep_ray" / "config").glob("*.py"):
        heavy = {"ray", "torch", "vllm", "pyarrow"}
        assert not {n for n in imported(path) if n.split(".")[0] in heavy}, name_of(path)
    adapters = {f"ep_ray.backends.{path.stem}" for path in (ROOT / "ep_ray/backends").glob("*.py")}
    adapters -= {f"ep_ray.backends.{name}" for name in ("__init__", "base", "registry")}
    shared = {"ep_ray.backends.torch_all_to_all"}
    for path in modules():
        if path.parent.name != "backends":
            assert not set(imported(path)) & (adapters - shared), name_of(path)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_is_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    # The schema is one list of keys; splitting it would scatter what a user looks up.
    if name_of(path) != "ep_ray/config/schema.py":
        assert lines < MOST_LINES
    if name_of(path) in ENTRIES:
        assert lines < MOST_LINES_OF_ENTRY


def undocumented(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if tree.body and not ast.get_docstring(tree):
        yield "the module"
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        public = isinstance(node, kinds) and not node.name.startswith("_")
        if public and not ast.get_docstring(node):
            yield node.name


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_what_is_public_says_what_it_is(path):
    assert list(undocumented(path)) == []


def test_conf_holds_only_yaml():
    files = [path for path in (ROOT / "conf").rglob("*") if path.is_file()]
    assert files
    assert {path.suffix for path in files} == {".yaml"}


def test_names_of_test_files_are_unique():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def texts() -> Iterator[Path]:
    folders = [*PACKAGES, "conf", "tests", "docs", "requirements", ".ci"]
    for path in [*ROOT.glob("*"), *(p for f in folders for p in (ROOT / f).rglob("*"))]:
        if path.is_file() and path.suffix in TEXTS and "__pycache__" not in path.parts:
            yield path


def test_no_file_names_a_path_of_this_machine():
    places = {ROOT, ROOT.parent, Path.home(), Path(sys.prefix)} - {Path("/"), Path("/tmp")}
    for path in texts():
        if path.name == ".git":
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        named = {place for place in places if f"{place}/" in text}
        assert not named, name_of(path)
