"""onnxruntime reports usage unless a variable stands before it is loaded; edgelin sets it first."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
VARIABLE = "ORT_DISABLE_TELEMETRY"
# Notes the variable when onnxruntime is about to be imported, and once more when all has run.
WATCH = f"""
import importlib.abc, os, sys
class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            print("loaded with", os.environ.get("{VARIABLE}"), flush=True)
        return None
sys.meta_path.insert(0, Watch())
sys.argv[0] = "edgelin"
"""
ENTRIES = {
    "edgelin": "import edgelin; edgelin.load(sys.argv[1])",
    "edgelin.runtimes": "from edgelin.runtimes import load; load(sys.argv[1])",
    "a module of the runtime": "import edgelin.runtimes.buffers",
    "edgelin.export": "import edgelin.export; from edgelin.export import profiles",
    "run": "from edgelin.cli import main; main(['run', sys.argv[1], 'a', '--max-tokens', '1'])",
    "inspect": "from edgelin.cli import main; main(['inspect', sys.argv[1]])",
    "export": "from edgelin.cli import main; main(['export', sys.argv[1], '-o', sys.argv[2]])",
}


def _loaded_with(code: str, *arguments: Any, **variables: str) -> list[str]:
    """What the variable was at every import of onnxruntime in a fresh interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", WATCH + code, *map(str, arguments)],
        cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("loaded with")]
    assert lines, done.stderr
    return [line.rpartition(" ")[2] for line in lines]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_variable_stands_before_onnxruntime_is_loaded(
    entry: str, tiny: Any, tmp_path: Path
) -> None:
    assert set(_loaded_with(ENTRIES[entry], tiny.path, tmp_path / "out")) == {"1"}


def test_the_watch_sees_an_import_without_it() -> None:
    assert set(_loaded_with("import onnxruntime")) == {"None"}


def test_a_choice_of_the_user_stays() -> None:
    assert set(_loaded_with(ENTRIES["edgelin.export"], **{VARIABLE: "0"})) == {"0"}


def test_scripts_import_edgelin_first() -> None:
    """In benchmarks and examples nothing else would set it."""
    for folder in ("benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in _imports(ast.parse(path.read_text())):
                if name.startswith("edgelin"):
                    break
                assert not name.startswith("onnxruntime"), f"{path} loads it before edgelin"


def _imports(tree: ast.Module) -> Iterator[str]:
    """Modules that a script imports when it is loaded, in order."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
