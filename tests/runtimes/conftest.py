"""The hand-made bundle of tiny_bundle.py as fixtures."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Test folders are no packages, so the builder is loaded by its path.
_spec = importlib.util.spec_from_file_location(
    "tiny_bundle", Path(__file__).with_name("tiny_bundle.py")
)
assert _spec is not None and _spec.loader is not None
tiny_bundle = sys.modules.setdefault("tiny_bundle", importlib.util.module_from_spec(_spec))
if not hasattr(tiny_bundle, "build"):
    _spec.loader.exec_module(tiny_bundle)


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """``build(folder, seed=0, **changes)`` writes a tiny bundle."""
    function: Callable[..., Any] = tiny_bundle.build
    return function


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny bundle that tests only read."""
    return tiny_bundle.build(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture
def damaged(tiny: Any, tmp_path: Path) -> Path:
    """A copy of the tiny bundle that a test may damage."""
    return Path(shutil.copytree(tiny.path, tmp_path / "copy"))
