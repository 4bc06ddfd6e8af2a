"""Files and functions stay short enough to be read whole."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("edgelin", "export", "runtimes", "benchmarks", "tests")
MODULE_LINES = 400
TEST_LINES = 450  # all forms of one recurrence are tested in one file
FUNCTION_LINES = 60
LINKS = (ROOT / "edgelin" / "export", ROOT / "edgelin" / "runtimes")


def _modules() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            # Python 3.13 stopped following links here; older ones list the linked folders twice.
            if not any(path.is_relative_to(link) for link in LINKS):
                yield path


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and docstring, which should not be cut to fit."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_modules_are_short() -> None:
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in _modules()}
    assert lines, "no module found"
    limits = {name: TEST_LINES if name.startswith("tests/") else MODULE_LINES for name in lines}
    assert {name: n for name, n in lines.items() if n > limits[name]} == {}


def test_functions_are_short() -> None:
    long = {}
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = _body_lines(node)
                if lines > FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = lines
    assert long == {}
