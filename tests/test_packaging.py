"""What is installed: every package, nothing loaded twice, and no torch where none is needed."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import edgelin

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = (ROOT / "edgelin" / "export", ROOT / "edgelin" / "runtimes")
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]

# Stands for a device: importing one of these raises ModuleNotFoundError.
BLOCK = (
    "import sys; sys.modules.update(dict.fromkeys("
    "['torch', 'onnx', 'onnx_ir', 'onnxscript', 'triton', 'matplotlib']));"
)


def _python(code: str, folder: Path = ROOT) -> str:
    """What ``code`` prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _sources() -> list[Path]:
    """Every module of the package."""
    files = {path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.py")}
    return sorted(path for path in files if not any(link in path.parents for link in LINKS))


def _imports(path: Path) -> set[str]:
    """Top-level names of all that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def test_every_package_is_listed() -> None:
    found = set()
    for package, folder in FOLDERS.items():
        root = ROOT / folder
        for path in _sources():
            if path.name == "__init__.py" and path.is_relative_to(root):
                found.add(".".join([package, *path.parent.relative_to(root).parts]))
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_links_lead_to_the_installed_folders() -> None:
    for link, folder in zip(LINKS, ("export", "runtimes/python"), strict=True):
        assert not link.readlink().is_absolute()
        assert link.resolve() == ROOT / folder


def test_distributions_hold_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "node_modules")
    for folder in ("edgelin", "export", "runtimes/python"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    for build in ("build_wheel", "build_sdist"):
        _python(f"from setuptools import build_meta; build_meta.{build}({str(tmp_path)!r})", source)

    modules = set()
    for package, folder in FOLDERS.items():
        for path in _sources():
            if path.is_relative_to(ROOT / folder):
                inside = path.relative_to(ROOT / folder).as_posix()
                modules.add(f"{package.replace('.', '/')}/{inside}")
    (wheel,) = tmp_path.glob("*.whl")
    assert modules | {"edgelin/py.typed"} <= set(zipfile.ZipFile(wheel).namelist())

    (sdist,) = tmp_path.glob("*.tar.gz")
    top = sdist.name.removesuffix(".tar.gz")
    files = {f"{top}/{path.relative_to(ROOT).as_posix()}" for path in _sources()}
    with tarfile.open(sdist) as archive:
        assert files | {f"{top}/LICENSE"} <= set(archive.getnames())


def test_version_is_the_distributions() -> None:
    assert edgelin.__version__ == PROJECT["project"]["version"]


def test_every_constraint_is_exact() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition("#")[0].strip() for line in lines]
    assert [pin for pin in pins if pin and "==" not in pin] == []


def test_no_second_copy_is_loaded() -> None:
    code = "import sys, edgelin.export, edgelin.runtimes; print('export' in sys.modules, end=' ')"
    assert _python(code + "; print('runtimes' in sys.modules)").split() == ["False", "False"]


@pytest.mark.parametrize("module", ["", ".cli", ".config", ".state", ".errors", ".runtimes"])
def test_imports_without_torch(module: str) -> None:
    _python(f"{BLOCK} import edgelin{module}")


def test_importing_edgelin_costs_nothing() -> None:
    code = (
        "import sys, edgelin; print(*{'numpy', 'click', 'onnxruntime', 'torch'} & {*sys.modules})"
    )
    assert _python(code).split() == []


def test_onnx_forms_import_no_torch() -> None:
    """Said of the file alone: its package's ``__init__`` does import torch."""
    forms = sorted((ROOT / "edgelin" / "recurrences").glob("*/onnx.py"))
    assert forms
    assert [path for path in forms if "torch" in _imports(path)] == []


def test_export_and_runtimes_are_imported_by_commands_only() -> None:
    """Data flows one way: models never know of graphs (``edgelin.load`` is the lazy exception)."""
    for path in _sources():
        inside = path.relative_to(ROOT).parts
        if inside[0] == "edgelin" and inside[1] not in ("cli", "__init__.py"):
            text = path.read_text()
            assert "edgelin.export" not in text.replace("`edgelin.export", ""), path
            assert "edgelin.runtimes" not in text.replace("`edgelin.runtimes", ""), path
