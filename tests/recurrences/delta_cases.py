"""What the tests of the delta rule share: inputs, gradients, an onnxruntime session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import onnxruntime as ort
import torch
from comparisons import Inputs, error, out_gradients
from torch import Tensor

from edgelin.recurrences.graph import Graph

NAMES = ("q", "k", "v", "beta", "g", "state")
SCALE = 0.5
# The repeated key with beta 2 mirrors the state at every token: nothing decays, errors add up.
HARD = ("same keys", "same keys, beta 2", "strong decay", "mixed decay", "front", "reset", "zeros")


def inputs(
    time: int,
    *,
    gated: bool = True,
    batch: int = 2,
    heads: int = 2,
    key: int = 6,
    value: int = 5,
    kind: str | None = None,
    by_key: bool = False,
) -> Inputs:
    """Float64 inputs with unit keys and a state that is not zero; ``kind`` is one of HARD.

    ``by_key``: every key has its own decay; where the kind says nothing else, they differ.
    """
    generator = torch.Generator().manual_seed(time)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k = torch.nn.functional.normalize(draw(batch, time, heads, key), dim=-1)
    beta = torch.sigmoid(draw(batch, time, heads))
    chance = torch.rand(batch, time, heads, generator=generator, dtype=torch.float64)
    q, v = draw(batch, time, heads, key), draw(batch, time, heads, value)
    state = draw(batch, heads, key, value)
    g = -0.5 * chance
    early = (torch.arange(time) < time // 2)[None, :, None].expand(g.shape)
    if kind in ("same keys", "same keys, beta 2"):
        k, g = k[:, :1].expand(k.shape).clone(), torch.zeros_like(g)
        beta = torch.full_like(beta, 2.0 if kind.endswith("2") else 1.0)
    elif kind == "zeros":
        q, k, v, beta, g = (torch.zeros_like(x) for x in (q, k, v, beta, g))
    elif kind is not None:
        g = {
            "strong decay": torch.full_like(g, -20.0),
            "mixed decay": torch.where(chance < 0.5, -20.0, -0.001),
            "front": torch.where(early, -20.0, -0.02),
            "reset": torch.where(chance < 0.2, -torch.inf, -0.01),
        }[kind].to(g.dtype)
    if by_key:
        share = torch.rand(k.shape, generator=generator, dtype=torch.float64)
        g = g[..., None] * (share > 0.5 if kind == "mixed decay" else share)
    return dict(zip(NAMES, (q, k, v, beta, g if gated else None, state), strict=True))


def with_gradients(function: Callable[..., Any], arguments: list[Any], made: Inputs) -> list[Any]:
    """o, the state, and the gradients of every input."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in arguments]
    outputs = function(*leaves, scale=SCALE)
    weights = [w.to(x.device, x.dtype) for w, x in zip(out_gradients(made), outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, [x for x in leaves if x is not None], weights)]


def close(results: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> None:
    """Assert that o, the state and what gradients there are agree."""
    errors = [error(r, e.cpu()) for r, e in zip(results, expected, strict=True)]
    assert max(errors) < bound, errors


def session(form: Callable[..., Any], made: Inputs, layers: int = 1) -> ort.InferenceSession:
    """An onnxruntime session of the op, or of several one after the other on each other's o."""
    float_ = ir.TensorType(ir.DataType.FLOAT)
    values = {}
    for name, x in made.items():
        if x is not None:
            axes = ["batch", *x.shape[1:]] if name == "state" else ["batch", "time", *x.shape[2:]]
            values[name] = ir.Value(name=name, shape=ir.Shape(axes), type=float_)
    _, heads, key, value = made["state"].shape  # type: ignore[union-attr]
    time = ir.node("Shape", [values["q"]], attributes={"start": 1, "end": 2})
    graph = Graph(time.outputs[0])
    v, state = values["v"], values["state"]
    for _ in range(layers):
        v, state = form(
            graph,
            *(values.get(n) for n in ("q", "k")),
            v,
            *(values.get(n) for n in ("beta", "g")),
            state,
            heads=heads,
            key_dim=key,
            value_dim=value,
            decay="none" if made["g"] is None else "head" if made["g"].dim() == 3 else "key",
            scale=SCALE,
        )
    for result, name, like in zip((v, state), ("o", "after"), ("v", "state"), strict=True):
        result.name, result.shape, result.type = name, values[like].shape, float_
    model = ir.Graph(
        list(values.values()),
        [v, state],
        nodes=[time, *graph.preamble, *graph.nodes],
        initializers=list(graph.initializers.values()),
        opset_imports={"": 21, "com.microsoft": 1},
        name="delta",
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # a refused call is logged too
    serialised = ir.to_proto(ir.Model(model, ir_version=9)).SerializeToString()
    return ort.InferenceSession(serialised, options, providers=["CPUExecutionProvider"])


def run(runner: ort.InferenceSession, made: Inputs) -> list[Tensor]:
    """o and the state."""
    feeds = {n: x.float().numpy() for n, x in made.items() if x is not None}
    return [torch.from_numpy(x) for x in runner.run(None, feeds)]
