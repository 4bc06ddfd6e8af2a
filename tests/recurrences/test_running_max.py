"""Running maximum: scan, custom op and ONNX form against a float64 loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from edgelin.recurrences.graph import Graph
from edgelin.recurrences.running_max import onnx as forms
from edgelin.recurrences.running_max import reference, running_max, stabilised

CHANNELS = 5
KINDS = ("mild", "strong", "mixed", "rising", "equal", "no decay")
Arrays = dict[str, np.ndarray]


def inputs(kind: str, time: int, batch: int = 2) -> Arrays:
    """Exponents, decays and a first maximum; float32 numbers, so that all see the same."""
    random = np.random.default_rng(time)
    shape = (batch, time, CHANNELS)
    x, g = 5 * random.standard_normal(shape), -np.exp(random.standard_normal(shape) - 2)
    if kind == "strong":
        g = 40 * g
    if kind == "mixed":  # what a difference of running sums would lose
        g = np.where(random.random(shape) < 0.3, -900.0, -1e-3)
    if kind == "rising":
        x = np.broadcast_to(np.linspace(-10, 40, time)[:, None], shape)
    if kind == "equal":
        x, g = np.zeros(shape), np.full(shape, -0.01)
    if kind == "no decay":
        g = np.zeros(shape)
    made = {"x": x, "g": g, "state": 4 + random.standard_normal((batch, CHANNELS))}
    return {name: array.astype(np.float32).astype(np.float64) for name, array in made.items()}


def loop(made: Arrays, dm: np.ndarray, dstate: np.ndarray) -> Arrays:
    """The equation, and its gradients by the chain rule."""
    x, g, m = made["x"], made["g"], made["state"]
    found, kept = [], []
    for t in range(x.shape[1]):
        decayed = m + g[:, t]
        kept.append(decayed > x[:, t])
        m = np.where(kept[-1], decayed, x[:, t])
        found.append(m)
    dx, dg, e = np.zeros_like(x), np.zeros_like(g), dstate
    for t in reversed(range(x.shape[1])):
        e = e + dm[:, t]
        dx[:, t], dg[:, t] = np.where(kept[t], 0, e), np.where(kept[t], e, 0)
        e = dg[:, t]
    return {"m": np.stack(found, axis=1), "after": m, "dx": dx, "dg": dg, "dstate": e}


def output_gradients(made: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Random gradients of m and of the last one."""
    random = np.random.default_rng(7)
    return random.standard_normal(made["x"].shape), random.standard_normal(made["state"].shape)


def tensors(made: Arrays, dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs as leaves."""
    return {name: torch.tensor(array, dtype=dtype).requires_grad_() for name, array in made.items()}


def check(got: dict[str, Tensor], expected: Arrays, tolerance: float) -> None:
    """All agree, relative to the largest entry."""
    for name, array in expected.items():
        scale = max(float(np.abs(array).max()), 1e-3)
        result = got[name].detach().double().numpy()
        np.testing.assert_allclose(result, array, rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 130])
def test_op_is_the_loop(kind: str, time: int) -> None:
    made = inputs(kind, time, batch=1 if time == 64 else 3)
    dm, dstate = output_gradients(made)
    expected = loop(made, dm, dstate)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        leaves = tensors(made, dtype)
        m, after = running_max(**leaves)
        outward = [torch.tensor(dm, dtype=dtype), torch.tensor(dstate, dtype=dtype)]
        grads = torch.autograd.grad([m, after], list(leaves.values()), outward)
        names = ("m", "after", "dx", "dg", "dstate")
        check(dict(zip(names, (m, after, *grads), strict=True)), expected, tolerance)


def test_reference_is_the_loop() -> None:
    made = inputs("mild", 9)
    expected = loop(made, *output_gradients(made))
    m, after = reference.forward(*tensors(made, torch.float64).values())
    check({"m": m, "after": after}, {n: expected[n] for n in ("m", "after")}, 1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_one_call(kind: str) -> None:
    made = {n: t.detach() for n, t in tensors(inputs(kind, 130), torch.float32).items()}
    whole, after = running_max(**made)
    state, found = made["state"], []
    for x, g in zip(*(made[n].split([1, 64, 1, 60, 4], dim=1) for n in ("x", "g")), strict=True):
        m, state = running_max(x, g, state)
        found.append(m)
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=0, atol=1e-5)


@pytest.mark.parametrize("first", [0.0, -1e38])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stabilised_memory_is_the_memory(kind: str, first: float) -> None:
    """exp(m_t) times the memory of scaled gates is S_t = exp(g_t) S_{t-1} + exp(x_t)."""
    made = inputs(kind, 130)
    made["state"] = np.full_like(made["state"], first)
    given = {n: t.detach() for n, t in tensors(made, torch.float32).items()}
    gate, decay, m, after = stabilised(**given)
    assert gate.max() <= 1 and decay.max() <= 0
    assert torch.equal(after, m[:, -1])
    memory = scaled = np.full_like(made["state"], first == 0)
    for t in range(130):
        memory = np.exp(made["g"][:, t]) * memory + np.exp(made["x"][:, t])
        scaled = np.exp(decay[:, t].double().numpy()) * scaled + gate[:, t].double().numpy()
        np.testing.assert_allclose(np.exp(m[:, t].double().numpy()) * scaled, memory, rtol=2e-4)


def test_op_registrations() -> None:
    leaves = tensors(inputs("mild", 4), torch.float32)
    torch.library.opcheck(torch.ops.edgelin.running_max, tuple(leaves.values()))


# --- ONNX ----------------------------------------------------------------------------------------


def session() -> ort.InferenceSession:
    """The ONNX form with all inputs dynamic."""

    def value(name: str, *shape: Any) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))

    x, g = (value(name, "batch", "time", CHANNELS) for name in ("x", "g"))
    state = value("state", "batch", CHANNELS)
    time = ir.node("Shape", [x], attributes={"start": 1, "end": 2})
    graph = Graph(time.outputs[0])
    outputs = forms.plain(graph, x, g, state)
    for output in outputs:
        output.type = ir.TensorType(ir.DataType.FLOAT)
    model = ir.Model(
        ir.Graph(
            [x, g, state],
            list(outputs),
            nodes=[time, *graph.preamble, *graph.nodes],
            initializers=list(graph.initializers.values()),
            opset_imports={"": 21},
        ),
        ir_version=9,
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4  # of the call that must fail
    data = ir.serde.serialize_model(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def feeds(made: Arrays) -> Arrays:
    return {name: array.astype(np.float32) for name, array in made.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_onnx_is_the_loop(kind: str) -> None:
    runner = session()
    for time, batch in ((1, 1), (2, 3), (7, 1), (63, 3), (64, 2)):
        made = inputs(kind, time, batch)
        expected = loop(made, *output_gradients(made))
        m, after = runner.run(None, feeds(made))
        scale = np.abs(expected["m"]).max()
        np.testing.assert_allclose(m, expected["m"], rtol=0, atol=2e-6 * scale)
        np.testing.assert_array_equal(after, m[:, -1])


def test_onnx_starts_from_nothing() -> None:
    made = inputs("mild", 64)
    made["state"] = np.full_like(made["state"], -1e38)
    m, _ = session().run(None, feeds(made))
    expected = loop(made, *output_gradients(made))["m"]
    np.testing.assert_allclose(m, expected, rtol=0, atol=1e-4)


def test_onnx_fails_beyond_a_chunk() -> None:
    with pytest.raises(Exception, match=r"indices element out of data bounds|out of bounds"):
        session().run(None, feeds(inputs("mild", 65)))
