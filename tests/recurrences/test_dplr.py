"""Diagonal plus low rank: chunked form, op, kernels and ONNX forms against a float64 loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from edgelin.recurrences import widths
from edgelin.recurrences.dplr import dplr
from edgelin.recurrences.dplr import onnx as forms
from edgelin.recurrences.dplr.reference import reference
from edgelin.recurrences.graph import Graph

Inputs = dict[str, Tensor]
SCALE = 0.7
HARD = [
    "repeat beta 1",
    "repeat beta 2",
    "delta beta 2",
    "step of -20",
    "mix",
    "no decay",
    "reset",
    "zeros",
]


def inputs(
    time: int,
    *,
    batch: int = 3,
    heads: int = 2,
    key: int = 7,
    value: int = 5,
    kind: str = "",
    seed: int = 0,
) -> Inputs:
    """float64 inputs whose transitions do not grow; ``kind`` names one of the hard ones."""
    made = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    rows = (batch, time, heads, key)
    q, k, b = (F.normalize(draw(*rows), dim=-1) for _ in range(3))
    g = -draw(*rows).abs()
    v, state = draw(batch, time, heads, value), draw(batch, heads, key, value)
    if kind == "step of -20":
        g = torch.full_like(g, -20.0)
    elif kind in ("mix", "delta beta 2"):
        g = torch.where(draw(*rows) < 0, -20.0, -0.001).double()
    elif kind in ("no decay", "repeat beta 1", "repeat beta 2"):
        g = torch.zeros_like(g)
    elif kind == "reset":
        g = torch.where(draw(*rows) < -0.5, -torch.inf, g)
    # below 1 where both are of unit length: the norm of Diag(e^g) + b a^T is then at most 1
    a, b = -b * g.exp(), b * torch.rand(rows, generator=made, dtype=torch.float64)
    if "beta" in kind:
        k = k[:, :1].expand(rows)
        a, b = k * g.exp(), -float(kind[-1]) * k
    if kind == "zeros":
        q, k, v, a, b, g, state = (0 * x for x in (q, k, v, a, b, g, state))
    made_inputs = {"q": q, "k": k, "v": v, "a": a, "b": b, "g": g, "state": state}
    return {name: x.contiguous() for name, x in made_inputs.items()}


def to(made: Inputs, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Arguments in order: g and the state at least float32."""
    full = torch.promote_types(dtype, torch.float32)
    return [x.to(device, full if name in ("g", "state") else dtype) for name, x in made.items()]


def rounded(made: Inputs, dtype: torch.dtype) -> Inputs:
    """What the arguments of this dtype are, in float64."""
    return {n: x.double() for n, x in zip(made, to(made, dtype), strict=True)}


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry (at least 1)."""
    assert got.shape == expected.shape and got.isfinite().all()
    difference = (got.double().cpu() - expected.double().cpu()).abs().max()
    return float(difference / expected.abs().max().clamp(min=1.0))


def close(got: Any, expected: Any, bound: float) -> None:
    """All results of two forms agree."""
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        assert error(x, y) < bound, f"result {i}: {error(x, y):.1e}"


def pulls(made: Inputs) -> tuple[Tensor, Tensor]:
    """Gradients of o and of the last state, float64."""
    g = torch.Generator().manual_seed(9)
    return tuple(  # type: ignore[return-value]
        torch.randn(made[name].shape, generator=g, dtype=torch.float64) for name in ("v", "state")
    )


def with_gradients(form: Callable[..., Any], arguments: list[Tensor], made: Inputs) -> list[Tensor]:
    """Outputs, state and the seven gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in arguments]
    outputs = form(*leaves, scale=SCALE)
    weights = [p.to(x.device, x.dtype) for p, x in zip(pulls(made), outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, leaves, weights)
    return [*(x.detach() for x in outputs), *gradients]


def test_reference_is_the_equation() -> None:
    made = inputs(5)
    q, k, v, a, b, g, state = (x.numpy().copy() for x in made.values())
    expected = np.zeros(v.shape)
    for n, t, h in np.ndindex(*v.shape[:3]):
        s = state[n, h]
        transition = np.diag(np.exp(g[n, t, h])) + np.outer(b[n, t, h], a[n, t, h])
        s = transition @ s + np.outer(k[n, t, h], v[n, t, h])
        state[n, h], expected[n, t, h] = s, SCALE * q[n, t, h] @ s
    o, after = reference(*to(made, torch.float64), scale=SCALE)
    np.testing.assert_allclose(o, expected, atol=1e-12)
    np.testing.assert_allclose(after, state, atol=1e-12)


@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 130])
def test_chunked_form_and_gradients(time: int) -> None:
    made = inputs(time, batch=1 if time == 63 else 3)
    expected = with_gradients(reference, to(made, torch.float64), made)
    exact = with_gradients(dplr, to(made, torch.float64), made)
    single = with_gradients(dplr, to(made, torch.float32), made)
    close(exact, expected, 1e-12)
    close(single, expected, 5e-6)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in single)


@pytest.mark.parametrize("kind", HARD)
def test_chunked_form_at_hard_inputs(kind: str) -> None:
    made = inputs(130, kind=kind)
    expected = with_gradients(reference, to(made, torch.float64), made)
    close(with_gradients(dplr, to(made, torch.float64), made), expected, 1e-10)
    close(with_gradients(dplr, to(made, torch.float32), made), expected, 1e-4)


def test_a_stretch_may_be_cut_anywhere() -> None:
    *tokens, state = to(inputs(130), torch.float64)
    whole, last = dplr(*tokens, state)
    parts = []
    for piece in (slice(0, 1), slice(1, 70), slice(70, 129), slice(129, 130)):
        o, state = dplr(*(x[:, piece] for x in tokens), state)
        parts.append(o)
    assert error(torch.cat(parts, dim=1), whole) < 1e-12
    assert error(state, last) < 1e-12


def test_no_gradient_below_the_floor() -> None:
    made = inputs(10, kind="reset")
    *_, dg, _ = with_gradients(dplr, to(made, torch.float64), made)
    assert torch.equal(dg == 0, made["g"] < -90)


def test_bfloat16_values_keep_a_float32_state() -> None:
    made = inputs(70)
    o, state = dplr(*to(made, torch.bfloat16), scale=SCALE)
    expected = reference(*rounded(made, torch.bfloat16).values(), scale=SCALE)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert error(o, expected[0]) < 1e-2 and error(state, expected[1]) < 5e-6


def test_gradients_of_the_op() -> None:
    leaves = [x.requires_grad_() for x in to(inputs(5, batch=1, key=3, value=2), torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: dplr(*x, scale=SCALE), leaves)


def test_one_unused_output_gives_no_gradient() -> None:
    q, k, v, *rest = to(inputs(5), torch.float64)
    v.requires_grad_()
    dplr(q, k, v, *rest)[1].sum().backward()
    assert v.grad is not None and v.grad.isfinite().all()


def test_custom_op_passes_the_op_checks() -> None:
    torch.library.opcheck(
        torch.ops.edgelin.dplr.default,
        (*to(inputs(3), torch.float32), SCALE),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_op_compiles_with_its_gradient() -> None:
    made = inputs(3)
    compiled = torch.compile(dplr, backend="aot_eager", fullgraph=True)
    expected = with_gradients(dplr, to(made, torch.float32), made)
    for e, r in zip(expected, with_gradients(compiled, to(made, torch.float32), made), strict=True):
        assert torch.equal(r, e)


def test_padding_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = inputs(9)
    expected = with_gradients(dplr, to(made, torch.float64), made)
    monkeypatch.setattr(widths, "needs_padding", lambda k, v: True)
    close(with_gradients(dplr, to(made, torch.float64), made), expected, 1e-12)


def session(form: Callable[..., Any], made: Inputs, layers: int = 1) -> ort.InferenceSession:
    """An onnxruntime session of the op, or of several one after the other on each other's o."""
    float_ = ir.TensorType(ir.DataType.FLOAT)
    values = {}
    for name, x in made.items():
        axes = ["batch", *x.shape[1:]] if name == "state" else ["batch", "time", *x.shape[2:]]
        values[name] = ir.Value(name=name, shape=ir.Shape(axes), type=float_)
    _, heads, key, _ = made["state"].shape
    time = ir.node("Shape", [values["q"]], attributes={"start": 1, "end": 2})
    graph = Graph(time.outputs[0])
    v, state = values["v"], values["state"]
    for _ in range(layers):
        given = values | {"v": v, "state": state}
        v, state = form(graph, *given.values(), heads=heads, key_dim=key, scale=SCALE)
    for result, name, like in zip((v, state), ("o", "after"), ("v", "state"), strict=True):
        result.name, result.shape, result.type = name, values[like].shape, float_
    model = ir.Graph(
        list(values.values()),
        [v, state],
        nodes=[time, *graph.preamble, *graph.nodes],
        initializers=list(graph.initializers.values()),
        opset_imports={"": 21},
        name="dplr",
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # a refused call is logged too
    serialised = ir.to_proto(ir.Model(model, ir_version=9)).SerializeToString()
    return ort.InferenceSession(serialised, options, providers=["CPUExecutionProvider"])


def run(runner: ort.InferenceSession, made: Inputs) -> list[Tensor]:
    """o and the state."""
    feeds = {n: x.float().numpy() for n, x in made.items()}
    return [torch.from_numpy(x) for x in runner.run(None, feeds)]


def test_onnx_forms() -> None:
    runner = session(forms.plain, inputs(1))
    assert forms.fused is forms.plain
    for time, batch in [(1, 1), (2, 3), (3, 1), (7, 3), (33, 1), (63, 1), (64, 3)]:
        made = inputs(time, batch=batch)
        expected = reference(*to(made, torch.float64), scale=SCALE)
        close(run(runner, made), expected, 3e-6)


@pytest.mark.parametrize("kind", HARD)
def test_onnx_forms_at_hard_inputs(kind: str) -> None:
    made = inputs(64, kind=kind)
    expected = reference(*to(made, torch.float64), scale=SCALE)
    close(run(session(forms.plain, made), made), expected, 5e-5)


def test_onnx_refuses_more_than_a_chunk() -> None:
    made = inputs(65)
    with pytest.raises(Exception, match="indices element out of data bounds"):
        run(session(forms.plain, made), made)


def test_onnx_tables_are_shared_by_layers() -> None:
    made = inputs(9)
    first, state = reference(*to(made, torch.float64), scale=SCALE)
    second = reference(*to(made | {"v": first, "state": state}, torch.float64), scale=SCALE)
    close(run(session(forms.plain, made, layers=2), made), second, 3e-6)
