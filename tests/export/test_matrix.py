"""Every mixer in every profile, float and rounded: one trace a mixer, all graphs made from it.

A float graph has to be the float64 model; a rounded one the float64 model with the rounded weights,
exactly so where its activations are left float, and otherwise as far from it as rounded activations
take the float64 model. (That the model is the mixer's equation is tests/mixers/test_mixers.py's.)

CI runs some of the table, so that every mixer family, profile and width is in it once; all of it is
``make test-full``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import export_models
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from loops import CASES

from edgelin.config import ModelConfig
from edgelin.export import golden, passes
from edgelin.export.profiles import PROFILES
from edgelin.export.quantise.nodes import quantise
from edgelin.export.quantise.recipe import RECIPES
from edgelin.export.quantise.rounding import Rounded
from edgelin.export.reference import reference
from edgelin.export.step_form import step_form
from edgelin.export.trace import trace
from edgelin.model import SequenceModel

WIDTHS = ("none", "int8", "int4")
TABLES = {name: export_models.MIXERS[name] for name in ("ssm", "attention")}
for _case in CASES.values():
    TABLES.setdefault(_case["type"], _case)
# In CI: one mixer of each recurrence, each with cells that together hold every row and column.
CI = {
    "gated_deltanet": [("fused", "int4"), ("plain", "int8"), ("onnx", "none")],
    "linear_attention": [("fused", "int8"), ("onnx", "int4")],
    "rwkv7": [("plain", "int4"), ("fused", "none")],
    "mamba": [("fused", "int4"), ("onnx", "int8")],
    "attention": [("plain", "int4"), ("onnx", "none")],
}
CELLS = [
    pytest.param(
        name, profile, width, marks=[] if (profile, width) in CI.get(name, []) else pytest.mark.full
    )
    for name in sorted(TABLES)
    for profile in PROFILES
    for width in WIDTHS
]


@dataclass
class Traced:
    """A tiny model, its graph, and what its golden stream is in float64."""

    model: SequenceModel
    graph: ir.Model
    exact: dict[str, golden.Stream]
    noisy: dict[str, golden.Stream]
    rounded: dict[str, dict[str, Rounded]]


def build(name: str) -> SequenceModel:
    """One layer of a mixer between wide enough matrices; something must have a state."""
    torch.manual_seed(0)
    stateless = name in ("mlp", "moe")
    config = ModelConfig(
        vocab_size=131,
        hidden_size=36,
        intermediate_size=40,
        layers=("m", "keep") if stateless else ("m",),
        mixers={"m": TABLES[name], **({"keep": TABLES["gated_deltanet"]} if stateless else {})},
    )
    model = SequenceModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return step_form(model)


@pytest.fixture(scope="module")
def traced() -> Iterator[Any]:
    """Gives the trace of a mixer; only the last one is kept."""
    kept: dict[str, Traced] = {}

    def get(name: str) -> Traced:
        if name not in kept:
            kept.clear()
            model = build(name)
            kept[name] = Traced(model, trace(model), {"none": reference(model)}, {}, {})
        return kept[name]

    yield get


def lowered(found: Traced, profile: str, width: str) -> ir.Model:
    """A graph; the first of a width also rounds the matrices for all profiles."""
    graph = found.graph.clone()
    passes.lower(graph, PROFILES[profile])
    recipe = RECIPES[width]
    if recipe is not None:
        recipe = recipe.for_model(found.model.config, mixers_only=False)
        outcome = quantise(graph, recipe, rounded=found.rounded.get(width))
        if width not in found.rounded:
            rounded = found.rounded[width] = dict(outcome.rounded)
            found.exact[width] = reference(found.model, rounded)
            found.noisy[width] = reference(found.model, rounded, rounded_activations=True)
    passes.finish(graph, PROFILES[profile])
    return graph


def replay(found: Traced, graph: ir.Model) -> golden.Stream:
    """The golden stream through onnxruntime, in its pieces."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_prepacking", "1")
    content = ir.serde.serialize_model(graph).SerializeToString()
    runner = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    specs, inputs = found.model.state_specs(), golden.inputs_of(found.model)
    states = {s.name: np.full((1, *s.sized()), s.initial, s.dtype) for s in specs}
    outputs = []
    for piece in np.split(inputs, np.cumsum(golden.PIECES)[:-1]):
        feeds = {s.input_name: states[s.name] for s in specs}
        feeds |= {"input_ids": piece[None], "num_logits_to_keep": np.array(0)}
        logits, *after = runner.run(None, feeds)
        outputs.append(logits[0].astype(np.float64))
        states = {s.name: array for s, array in zip(specs, after, strict=True)}
    last = {name: array[0] for name, array in states.items()}
    return golden.Stream(inputs, np.concatenate(outputs), last, True)


def leave_activations_float(graph: ir.Model) -> None:
    """As :mod:`edgelin.export.activations` does for a file."""
    for node in graph.graph:
        if "accuracy_level" in node.attributes:
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)


@pytest.mark.parametrize(("name", "profile", "width"), CELLS)
def test_cell(traced: Any, name: str, profile: str, width: str) -> None:
    found = traced(name)
    graph = lowered(found, profile, width)
    ops = {node.op_type for node in graph.graph}
    assert width == "none" or ops & {"MatMulNBits", "QMoE"}
    if width != "none":
        got = golden.compare(found.exact[width], replay(found, graph))
        noise = golden.compare(found.exact[width], found.noisy[width])
        assert got.finite and got.outputs < 1e-4 + 2 * noise.outputs
        assert (got.states or 0) < 1e-4 + 2 * (noise.states or 0)
        leave_activations_float(graph)
    got = golden.compare(found.exact[width], replay(found, graph))
    assert got.finite and got.outputs < 1e-4 and (got.states or 0) < 1e-4
