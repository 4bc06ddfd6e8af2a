"""Every mixer, run as a device runs it, against what a GPU's kernels made in parallel form."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from loops import CASES

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden" / "mixers.npz"
PIECE = 65  # tokens in one call, before single steps
pytestmark = pytest.mark.skipif(
    not GOLDEN.is_file(), reason="tests/gpu/golden_mixers.py has to write the vectors on a GPU"
)
LIMITS = {"float32": 2e-4, "bfloat16": 5e-2}  # of max|x - y| / max|y|


@cache
def _script() -> ModuleType:
    """The module that wrote the vectors, for its weights, inputs and samples."""
    path = TESTS / "gpu" / "golden_mixers.py"
    spec = importlib.util.spec_from_file_location("golden_mixers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


def streamed(mixer: Any, given: dict[str, Any]) -> list[Any]:
    """Output and states of a piece and then of single tokens."""
    script, x = _script(), given["x"]
    states = {spec.name: given[spec.name] for spec in mixer.state_specs()}
    position, outputs = torch.tensor([0, 3, 1_000_000]), []
    for start, stop in [(0, PIECE), *((t, t + 1) for t in range(PIECE, x.shape[1]))]:
        part = x[:, start:stop]
        extra = script.shared_with(mixer, part)
        y, states = mixer(part, states, position + start, *extra)
        outputs.append(y)
    return [torch.cat(outputs, dim=1), *(states[s.name] for s in mixer.state_specs())]


@pytest.mark.parametrize("case", CASES)
def test_steps_compute_what_a_gpu_computed(case: str, golden: dict[str, np.ndarray]) -> None:
    script = _script()
    mixer = script.build(case)
    given = script.arguments(mixer, torch.float32, "cpu")
    names = ["y", *(spec.name for spec in mixer.state_specs())]
    with torch.no_grad():
        results = streamed(mixer, given)
    for kind, limit in LIMITS.items():
        for name, result in zip(names, results, strict=True):
            wanted = golden[f"{case}/{kind}/{name}"]
            error = np.abs(script.sampled(result) - wanted).max()
            assert error <= limit * max(np.abs(wanted).max(), 1e-6), (kind, name)


def test_no_vectors_of_mixers_that_are_gone(golden: dict[str, np.ndarray]) -> None:
    assert {name.split("/")[0] for name in golden} == set(CASES)
