"""Fixtures that every test shares. Kernels run interpreted where there is no CUDA GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
