"""Inputs, float64 gradients and ONNX sessions that the tests of the linear recurrence share."""

from __future__ import annotations

import onnx_ir as ir
import onnxruntime as ort
import torch

from edgelin.recurrences.graph import Graph
from edgelin.recurrences.linear import reference

DECAYS = ("none", "head", "key")
HARD = ("zeros", "const20", "mix", "front", "reset")  # ways in which a running sum loses digits


def make(decay, time, *, batch=1, heads=2, key=6, value=5, dtype=torch.float32, hard=None, seed=0):
    """Random q, k, v, g, state; ``hard`` picks the decays."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    q, k = (draw(batch, time, heads, key).to(dtype) for _ in range(2))
    v, state = draw(batch, time, heads, value).to(dtype), draw(batch, heads, key, value)
    shape = (batch, time, heads) if decay == "head" else (batch, time, heads, key)
    chance = torch.rand(shape, generator=rng, dtype=torch.float64)
    front = (torch.arange(time) < time // 2).reshape(1, -1, *[1] * (len(shape) - 2))
    g = {
        None: -0.2 * chance,
        "zeros": 0.0 * chance,
        "const20": -20.0 + 0.0 * chance,
        "mix": torch.where(chance < 0.2, -20.0, -0.001),
        "front": torch.where(front, -20.0, -0.02).double() + 0.0 * chance,
        "reset": torch.where(chance < 0.1, -1000.0, -0.01),
    }[hard]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return q, k, v, None if decay == "none" else g.to(wide), state.to(wide)


def error(got, want):
    """Largest difference, relative to the largest value."""
    assert got.shape == want.shape
    difference = (got.detach().cpu().double() - want.detach().cpu().double()).abs().max()
    return float(difference / want.detach().abs().max().clamp(min=1e-30))


def true_gradients(inputs, scale, grads, *more):
    """Gradients by float64 autograd through the sequential form, and its results."""
    leaves = [None if x is None else x.double().requires_grad_() for x in inputs]
    results = reference.forward(*leaves, scale, *more)
    given = [x for x in leaves if x is not None]
    return torch.autograd.grad(results, given, [x.double() for x in grads]), results


def onnx_session(form, decay, heads, key, value, scale, **more):
    """An onnxruntime session of one form, with dynamic batch and time."""
    shapes = {
        "q": ["B", "T", heads, key],
        "k": ["B", "T", heads, key],
        "v": ["B", "T", heads, value],
        "g": ["B", "T", heads] if decay == "head" else ["B", "T", heads, key],
        "state": ["B", heads, key, value],
    }
    if decay == "none":
        del shapes["g"]
    values = {
        name: ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        for name, shape in shapes.items()
    }
    time = ir.node("Shape", [values["q"]], attributes={"start": 1, "end": 2})
    graph = Graph(time.outputs[0])
    results = form(
        graph,
        *(values.get(name) for name in ("q", "k", "v", "g", "state")),
        heads=heads,
        key_dim=key,
        value_dim=value,
        decay=decay,
        scale=scale,
        **more,
    )
    for result, name, shape in zip(results, ("o", "final"), ("v", "state"), strict=True):
        result.name, result.shape = name, ir.Shape(shapes[shape])
        result.type = ir.TensorType(ir.DataType.FLOAT)
    model = ir.Model(
        ir.Graph(
            list(values.values()),
            results,
            nodes=[time, *graph.preamble, *graph.nodes],
            initializers=list(graph.initializers.values()),
            opset_imports={"": 21, "com.microsoft": 1},
            name="linear",
        ),
        ir_version=9,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # a refused call is expected to fail, not to print
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def onnx_run(session, inputs):
    """o and the final state of one call."""
    names = ("q", "k", "v", "g", "state")
    feed = {n: x.numpy() for n, x in zip(names, inputs, strict=True) if x is not None}
    return [torch.from_numpy(x) for x in session.run(["o", "final"], feed)]
