"""The exported graphs against the model in float64 with the sequential recurrences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export_models import MIXERS, VOCAB, make_model, random_state, session

from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.trace import trace
from edgelin.model import SequenceModel
from edgelin.recurrences.delta import chunked as delta_chunked
from edgelin.recurrences.delta import reference as delta_reference
from edgelin.recurrences.diagonal import chunked as diagonal_chunked
from edgelin.recurrences.diagonal import reference as diagonal_reference
from edgelin.recurrences.linear import chunked as linear_chunked
from edgelin.recurrences.linear import reference as linear_reference

PIECES = (1, 7, 63, 64, 1)
State = dict[str, np.ndarray[Any, np.dtype[Any]]]


@pytest.fixture
def sequential(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model run token by token: nothing of the chunked forms is left."""

    def delta(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return delta_reference.reference(*args[:-1], scale=args[-1])

    monkeypatch.setattr(linear_chunked, "forward", linear_reference.forward)
    monkeypatch.setattr(diagonal_chunked, "forward", diagonal_reference.forward)
    monkeypatch.setattr(delta_chunked, "forward", delta)


def exact(
    model: SequenceModel, ids: np.ndarray[Any, Any], state: State
) -> tuple[np.ndarray[Any, Any], State]:
    """The float64 model over all tokens in one call."""
    double = copy.deepcopy(model).double()
    given = {
        name: torch.from_numpy(x).double() if x.dtype == np.float32 else torch.from_numpy(x)
        for name, x in state.items()
    }
    with torch.no_grad():
        logits, after = double(torch.from_numpy(ids), given)
    return logits.numpy(), {name: x.numpy() for name, x in after.items()}


def run(
    graph: ir.Model, model: SequenceModel, ids: np.ndarray[Any, Any], state: State
) -> tuple[np.ndarray[Any, Any], State]:
    """The graph over pieces of the tokens, all logits."""
    runner, logits = session(graph), []
    start = 0
    for length in PIECES:
        feeds = {"input_ids": ids[:, start : start + length], "num_logits_to_keep": np.array(0)}
        feeds |= {spec.input_name: state[spec.name] for spec in model.state_specs()}
        piece, *after = runner.run(None, feeds)
        logits.append(piece)
        state = {spec.name: x for spec, x in zip(model.state_specs(), after, strict=True)}
        start += length
    return np.concatenate(logits, 1), state


def assert_close(
    got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], tolerance: float, name: str
) -> None:
    """Largest difference, relative to the largest value."""
    assert got.shape == wanted.shape, name
    assert np.isfinite(got).all(), name
    error = np.abs(got - wanted).max() / np.abs(wanted).max()
    assert error < tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("profile", list(PROFILES))
def test_graph_equals_float64_model(
    profile: str,
    batch: int,
    model: SequenceModel,
    lowered: Callable[[str], ir.Model],
    sequential: None,
) -> None:
    graph = lowered(profile)
    ids = np.random.default_rng(2).integers(0, VOCAB, (batch, sum(PIECES)))
    state = random_state(model, batch)
    logits, after = exact(model, ids, state)
    got, got_after = run(graph, model, ids, state)
    assert_close(got, logits, 2e-5, "logits")
    for name, value in after.items():
        if value.dtype.kind == "i":
            np.testing.assert_array_equal(got_after[name], value)
        else:
            assert_close(got_after[name], value, 2e-5, name)


def test_untied_head(sequential: None) -> None:
    model = make_model(("linear",), tied=False)
    graph = trace(model)
    passes.lower(graph, PROFILES["fused"])
    passes.finish(graph, PROFILES["fused"])
    ids = np.random.default_rng(2).integers(0, VOCAB, (1, sum(PIECES)))
    state = random_state(model, 1)
    logits = run(graph, model, ids, state)[0]
    assert_close(logits, exact(model, ids, state)[0], 2e-5, "logits")


@pytest.mark.parametrize("keep, rows", [(None, 1), (1, 1), (0, 7), (3, 3), (9, 7)])
def test_num_logits_to_keep(
    keep: int | None, rows: int, model: SequenceModel, lowered: Callable[[str], ir.Model]
) -> None:
    runner = session(lowered("fused"))
    feeds: dict[str, Any] = {
        spec.input_name: x
        for spec, x in zip(model.state_specs(), random_state(model, 2).values(), strict=True)
    }
    feeds["input_ids"] = np.random.default_rng(3).integers(0, VOCAB, (2, 7))
    every = runner.run(["logits"], {**feeds, "num_logits_to_keep": np.array(0)})[0]
    if keep is not None:
        feeds["num_logits_to_keep"] = np.array(keep)
    logits = runner.run(["logits"], feeds)[0]
    assert logits.shape == (2, rows, VOCAB)
    np.testing.assert_allclose(logits, every[:, -rows:], atol=1e-6)


def test_plain_refuses_more_than_a_chunk(
    model: SequenceModel, lowered: Callable[[str], ir.Model]
) -> None:
    runner = session(lowered("plain"))
    feeds: dict[str, Any] = {
        spec.input_name: x
        for spec, x in zip(model.state_specs(), random_state(model, 1).values(), strict=True)
    }
    runner.run(None, {**feeds, "input_ids": np.zeros((1, 64), np.int64)})
    with pytest.raises(Exception, match="out of data bounds"):
        runner.run(None, {**feeds, "input_ids": np.zeros((1, 65), np.int64)})


def test_attention_to_all_tokens_refuses_more_than_a_chunk() -> None:
    model = make_model(("full",))
    graph = trace(model)
    passes.lower(graph, PROFILES["plain"])
    passes.finish(graph, PROFILES["plain"])
    runner, state = session(graph), model.initial_state(1)
    feeds: dict[str, Any] = {s.input_name: state[s.name].numpy() for s in model.state_specs()}
    runner.run(None, {**feeds, "input_ids": np.zeros((1, 64), np.int64)})
    with pytest.raises(Exception, match="out of data bounds"):
        runner.run(None, {**feeds, "input_ids": np.zeros((1, 65), np.int64)})


@pytest.mark.parametrize("profile", list(PROFILES))
def test_operators_belong_to_the_profile(profile: str, lowered: Callable[[str], ir.Model]) -> None:
    graph = lowered(profile)
    domains = {node.domain for node in graph.graph}
    assert domains == ({"", "com.microsoft"} if profile == "fused" else {""})
    assert graph.opset_imports[""] == PROFILES[profile].opset
    assert not {n.op_type for n in graph.graph} & {"Scan", "Loop", "If", "SequenceAt"}


def test_short_attention_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS["attention"], "window", 32)
    with pytest.raises(EdgelinError, match="layer 0: an attention window of 32 can't be exported"):
        trace(make_model(("attention",)))


def test_export_is_deterministic(traced: ir.Model) -> None:
    files = []
    for _ in range(2):
        graph = traced.clone()
        passes.lower(graph, PROFILES["fused"])
        passes.finish(graph, PROFILES["fused"])
        files.append(ir.serde.serialize_model(graph).SerializeToString(deterministic=True))
    assert files[0] == files[1]


def test_graph_inputs_and_outputs_are_those_of_the_states(
    model: SequenceModel, lowered: Callable[[str], ir.Model]
) -> None:
    runner = session(lowered("fused"))
    specs = model.state_specs()
    assert [i.name for i in runner.get_inputs()] == ["input_ids", *(s.input_name for s in specs)]
    assert [o.name for o in runner.get_outputs()] == ["logits", *(s.output_name for s in specs)]
    kept = runner.get_overridable_initializers()
    assert [(i.name, i.shape) for i in kept] == [("num_logits_to_keep", [])]
    for spec, given in zip(specs, runner.get_inputs()[1:], strict=True):
        assert given.shape == ["batch", *spec.shape]
    assert runner.get_outputs()[0].shape == ["batch", "kept", VOCAB]
