"""Fixtures that every test shares. Kernels run interpreted where there is no CUDA GPU."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before onnxruntime is loaded anywhere

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel file is imported

torch.set_num_threads(1)  # pytest-xdist gives every core a worker


@pytest.fixture
def device() -> str:
    """Where kernels run: a GPU, or the CPU through Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def unmeasured() -> Iterator[Callable[..., Any] | None]:
    """Keep exports from measuring speed, in a fresh process of seconds; gives what would."""
    bundle = sys.modules.get("edgelin.export.bundle")  # loaded if any collected test exports
    measure = getattr(bundle, "measure", None)
    with pytest.MonkeyPatch.context() as patch:
        if bundle is not None:
            patch.setattr(bundle, "measure", lambda folder, variant: {})
        yield measure


@pytest.fixture(autouse=True)
def nan_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill new tensors with NaN, so that a cell which a kernel leaves unwritten is seen."""

    def filled(make):  # type: ignore[no-untyped-def]
        def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return wrapper

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    yield


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """``build(folder, seed=0, **changes)`` writes the hand-made bundle of tiny_bundle.py."""
    import tiny_bundle  # needs onnx and tokenizers, which a GPU machine may lack

    function: Callable[..., Any] = tiny_bundle.build
    return function


@pytest.fixture(scope="session")
def tiny(build: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny bundle that tests only read."""
    return build(tmp_path_factory.mktemp("bundle") / "tiny")


@pytest.fixture(scope="session")
def sensor(build: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same of features, with a class for every step; tests only read it."""
    from tiny_bundle import build_features

    from edgelin.runtimes.signature import Output

    output = Output(3, "outputs", "step", "classification", ("walk", "sit down", "läuft"))
    return build_features(tmp_path_factory.mktemp("bundle") / "sensor", output)


@pytest.fixture(scope="session")
def meter(build: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same with two numbers for all that was read so far."""
    from tiny_bundle import build_features

    from edgelin.runtimes.signature import Output

    output = Output(2, "outputs", "sequence", "regression")
    return build_features(tmp_path_factory.mktemp("bundle") / "meter", output)


@pytest.fixture
def damaged(tiny: Any, tmp_path: Path) -> Path:
    """A copy of the tiny bundle that a test may damage."""
    return Path(shutil.copytree(tiny.path, tmp_path / "copy"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--full`` runs what is too long for CI, too."""
    parser.addoption("--full", action="store_true", help="run tests marked full, too")


def pytest_configure(config: pytest.Config) -> None:
    """Few examples for CI, the same ones every time; many new ones with ``--full``."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # a GPU machine may lack it
        return
    common: dict[str, Any] = {
        "deadline": None,  # the machine may be busy
        "database": None,
        "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    }
    settings.register_profile("ci", max_examples=25, derandomize=True, **common)
    settings.register_profile("full", max_examples=400, **common)
    settings.load_profile("full" if config.getoption("--full") else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked ``full`` unless asked for; skip ``gpu`` where there is no GPU."""
    if not config.getoption("--full"):
        left_out = [item for item in items if "full" in item.keywords]
        items[:] = [item for item in items if "full" not in item.keywords]
        config.hook.pytest_deselected(items=left_out)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
