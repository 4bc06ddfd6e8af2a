"""The shared models of export_models.py as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import export_models
import onnx_ir as ir
import pytest

from edgelin import checkpoint, tokenizer
from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.trace import trace
from edgelin.model import SequenceModel


@pytest.fixture(scope="session")
def model() -> SequenceModel:
    """One layer of every mixer."""
    return export_models.make_model(tuple(export_models.MIXERS))


@pytest.fixture(scope="session")
def traced(model: SequenceModel) -> ir.Model:
    """Its trace; clone it before a pass."""
    return trace(model)


@pytest.fixture(scope="session")
def lowered(traced: ir.Model) -> Callable[[str], ir.Model]:
    """Its float graph in a profile."""
    graphs: dict[str, ir.Model] = {}

    def get(profile: str) -> ir.Model:
        if profile not in graphs:
            graph = traced.clone()
            passes.lower(graph, PROFILES[profile])
            passes.finish(graph, PROFILES[profile])
            graphs[profile] = graph
        return graphs[profile]

    return get


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of two layers; tests must not change it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    tokens = tokenizer.train(
        ["a small text of a few words and more words " * 20], export_models.VOCAB
    )
    checkpoint.save(folder, export_models.make_model(("gdn", "linear")), tokens.to_str())
    yield folder
