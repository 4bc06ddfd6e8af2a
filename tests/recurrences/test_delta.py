"""Delta rule: chunked form, custom op, kernels and ONNX forms against a float64 loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from edgelin.recurrences.chunks import unit_lower_inverse
from edgelin.recurrences.delta import delta
from edgelin.recurrences.delta import onnx as forms
from edgelin.recurrences.delta.reference import reference
from edgelin.recurrences.graph import Graph

NAMES = ("q", "k", "v", "beta", "g", "state")
SCALE = 0.5
# The repeated key with beta 2 mirrors the state at every token: nothing decays, errors add up.
HARD = ("same keys", "same keys, beta 2", "strong decay", "mixed decay", "front", "reset", "zeros")
Inputs = dict[str, Tensor | None]


def inputs(
    time: int,
    *,
    gated: bool = True,
    batch: int = 2,
    heads: int = 2,
    key: int = 6,
    value: int = 5,
    kind: str | None = None,
) -> Inputs:
    """Float64 inputs with unit keys and a state that is not zero; ``kind`` is one of HARD."""
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
            "reset": torch.where(chance < 0.2, -1000.0, -0.01),
        }[kind].to(g.dtype)
    return dict(zip(NAMES, (q, k, v, beta, g if gated else None, state), strict=True))


def to(made: Inputs, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Arguments of the op: g and state keep float32 where the rest is bfloat16."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    kinds = {"g": wide, "state": wide}
    return [None if x is None else x.to(device, kinds.get(n, dtype)) for n, x in made.items()]


def rounded(made: Inputs, dtype: torch.dtype) -> Inputs:
    """What the op sees in ``dtype``, in float64 again."""
    values = (None if x is None else x.double() for x in to(made, dtype))
    return dict(zip(NAMES, values, strict=True))


def error(result: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert result.shape == expected.shape
    largest = expected.detach().abs().max().clamp(min=1e-30)
    return float((result.detach().cpu().double() - expected.detach()).abs().max() / largest)


def out_gradients(made: Inputs) -> tuple[Tensor, Tensor]:
    """Fixed random gradients of the outputs and of the last state."""
    generator = torch.Generator().manual_seed(1)
    do, dstate = (
        torch.randn(made[n].shape, generator=generator, dtype=torch.float64)  # type: ignore[union-attr]
        for n in ("v", "state")
    )
    return do, dstate


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


@pytest.fixture
def bfloat16_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bfloat16 numbers: give it the numbers."""
    if torch.cuda.is_available():
        return
    import triton.language as tl  # noqa: TID251
    from triton.runtime import interpreter  # noqa: TID251

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        numbers = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    dot = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest),
    )


def kernel_results(made: Inputs, dtype: torch.dtype, device: str) -> list[Tensor]:
    """What ``with_gradients`` returns, from the kernels."""
    from edgelin.recurrences.delta import kernel, kernel_backward

    arguments = to(made, dtype, device)
    do, dstate = out_gradients(made)
    outputs = kernel.forward(*arguments, SCALE)
    gradients = list(
        kernel_backward.backward(
            *arguments, SCALE, do.to(device, dtype), dstate.to(device, torch.float32)
        )
    )
    if made["g"] is None:
        assert gradients.pop(4).numel() == 0
    return [*outputs, *gradients]


def test_reference_is_the_equation() -> None:
    made = inputs(5)
    q, k, v, beta, g, state = (x.numpy().copy() for x in made.values())  # type: ignore[union-attr]
    expected = np.zeros(v.shape)
    for b, t, h in np.ndindex(*beta.shape):
        s = np.exp(g[b, t, h]) * state[b, h]
        s = s - beta[b, t, h] * np.outer(k[b, t, h], k[b, t, h] @ s - v[b, t, h])
        state[b, h], expected[b, t, h] = s, SCALE * q[b, t, h] @ s
    o, after = reference(*to(made, torch.float64), scale=SCALE)
    np.testing.assert_allclose(o, expected, atol=1e-12)
    np.testing.assert_allclose(after, state, atol=1e-12)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 130])
def test_chunked_form_and_gradients(time: int, gated: bool) -> None:
    made = inputs(time, gated=gated, batch=1 if time == 63 else 3)
    expected = with_gradients(reference, to(made, torch.float64), made)
    exact = with_gradients(delta, to(made, torch.float64), made)
    single = with_gradients(delta, to(made, torch.float32), made)
    close(exact, expected, 1e-12)
    close(single, expected, 5e-6)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in single)


@pytest.mark.parametrize("kind", HARD)
def test_chunked_form_at_hard_inputs(kind: str) -> None:
    made = inputs(130, kind=kind)
    expected = with_gradients(reference, to(made, torch.float64), made)
    single = with_gradients(delta, to(made, torch.float32), made)
    close(single, expected, 1e-4)


def test_keys_need_not_have_unit_length() -> None:
    made = inputs(20)
    made["k"] = 1.5 * made["k"]  # type: ignore[operator]
    arguments = to(made, torch.float64)
    close(delta(*arguments), reference(*arguments), 1e-11)


def test_a_stretch_may_be_cut_anywhere() -> None:
    made = inputs(130)
    q, k, v, beta, g, state = to(made, torch.float64)
    whole, last = delta(q, k, v, beta, g, state)
    parts = []
    for piece in (slice(0, 1), slice(1, 70), slice(70, 130)):
        o, state = delta(*(x[:, piece] for x in (q, k, v, beta, g)), state)
        parts.append(o)
    assert error(torch.cat(parts, dim=1), whole) < 1e-12
    assert error(state, last) < 1e-12


def test_no_gradient_below_the_floor() -> None:
    made = inputs(10, kind="reset")
    *_, dg, _ = with_gradients(delta, to(made, torch.float64), made)
    assert torch.equal(dg == 0, made["g"] < -90)  # type: ignore[operator]


def test_bfloat16_values_keep_a_float32_state() -> None:
    made = inputs(70)
    o, state = delta(*to(made, torch.bfloat16), scale=SCALE)
    expected = reference(*to(rounded(made, torch.bfloat16), torch.float64), scale=SCALE)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert error(o, expected[0]) < 1e-2 and error(state, expected[1]) < 5e-6


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_the_op(gated: bool) -> None:
    leaves = [
        None if x is None else x.requires_grad_()
        for x in to(inputs(5, gated=gated, batch=1, key=3, value=2), torch.float64)
    ]
    assert torch.autograd.gradcheck(lambda *x: delta(*x, scale=SCALE), leaves)


def test_one_unused_output_gives_no_gradient() -> None:
    made = inputs(5)
    q, k, v, beta, g, state = to(made, torch.float64)
    v.requires_grad_()
    _, last = delta(q, k, v, beta, g, state)
    last.sum().backward()
    assert v.grad is not None and v.grad.isfinite().all()


@pytest.mark.parametrize("gated", [False, True])
def test_custom_op_passes_the_op_checks(gated: bool) -> None:
    torch.library.opcheck(
        torch.ops.edgelin.delta.default,
        (*to(inputs(3, gated=gated), torch.float32), SCALE),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("gated", [False, True])
def test_op_compiles_with_its_gradient(gated: bool) -> None:
    made = inputs(3, gated=gated)
    compiled = torch.compile(delta, backend="aot_eager", fullgraph=True)
    expected = with_gradients(delta, to(made, torch.float32), made)
    for e, r in zip(expected, with_gradients(compiled, to(made, torch.float32), made), strict=True):
        assert torch.equal(r, e)


def test_unit_lower_inverse_of_repeated_keys() -> None:
    size = 64
    lower = torch.full((size, size), 2.0).tril(-1)
    product = (lower + torch.eye(size)).double() @ unit_lower_inverse(lower).double()
    assert error(product, torch.eye(size, dtype=torch.float64)) < 1e-6


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "time, key, value, batch", [(1, 20, 36, 3), (63, 16, 8, 1), (64, 20, 36, 1), (130, 70, 68, 1)]
)
def test_kernels(time: int, key: int, value: int, batch: int, gated: bool, device: str) -> None:
    made = inputs(time, gated=gated, batch=batch, heads=2, key=key, value=value)
    expected = with_gradients(reference, to(made, torch.float64), made)
    results = kernel_results(made, torch.float32, device)
    close(results, expected, 2e-5)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in results)


@pytest.mark.parametrize("kind", HARD)
def test_kernels_at_hard_inputs(kind: str, device: str) -> None:
    made = inputs(65, batch=1, key=16, value=16, kind=kind)
    expected = with_gradients(reference, to(made, torch.float64), made)
    results = kernel_results(made, torch.float32, device)
    close(results, expected, 1e-4)


def test_kernels_clamp_as_the_chunked_form(device: str) -> None:
    made = inputs(10, kind="reset")
    *_, dg, _ = kernel_results(made, torch.float32, device)
    assert torch.equal(dg.cpu() == 0, made["g"] < -90)  # type: ignore[operator]


@pytest.mark.parametrize("gated", [False, True])
def test_kernels_in_bfloat16(gated: bool, device: str, bfloat16_dots: None) -> None:
    made = rounded(inputs(130, gated=gated, batch=1, key=64, value=128), torch.bfloat16)
    expected = with_gradients(reference, to(made, torch.float64), made)
    results = kernel_results(made, torch.bfloat16, device)
    close(results, expected, 3e-2)
    assert [r.dtype for r in results[:2]] == [torch.bfloat16, torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "time, key, value, heads",
    [
        (300, 64, 64, 2),
        (1024, 64, 128, 2),
        (300, 128, 128, 64),
        (130, 256, 256, 2),
        (1, 128, 64, 2),
    ],
)
def test_kernels_on_a_gpu(
    time: int, key: int, value: int, heads: int, gated: bool, dtype: torch.dtype, bound: float
) -> None:
    made = inputs(time, gated=gated, heads=heads, key=key, value=value)
    made["q"] = made["q"] * key**-0.5  # type: ignore[operator]
    made = rounded(made, dtype)
    expected = with_gradients(reference, to(made, torch.float64, "cuda"), made)
    results = kernel_results(made, dtype, "cuda")
    close(results, expected, bound)
    close(with_gradients(delta, to(made, dtype, "cuda"), made), expected, bound)


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
            decay="none" if made["g"] is None else "head",
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


@pytest.mark.parametrize("form", [forms.plain, forms.fused])
@pytest.mark.parametrize("gated", [False, True])
def test_onnx_forms(form: Callable[..., Any], gated: bool) -> None:
    runner = session(form, inputs(1, gated=gated))
    for time, batch in [(1, 1), (2, 3), (7, 3), (63, 1), (64, 3)]:
        made = inputs(time, gated=gated, batch=batch)
        expected = reference(*to(made, torch.float64), scale=SCALE)
        close(run(runner, made), expected, 3e-6)


@pytest.mark.parametrize("form", [forms.plain, forms.fused])
@pytest.mark.parametrize("kind", HARD)
def test_onnx_forms_at_hard_inputs(form: Callable[..., Any], kind: str) -> None:
    made = inputs(64, kind=kind)
    expected = reference(*to(made, torch.float64), scale=SCALE)
    close(run(session(form, made), made), expected, 5e-5)


def test_onnx_limits_of_time() -> None:
    made = inputs(65)
    with pytest.raises(Exception, match="indices element out of data bounds"):
        run(session(forms.plain, made), made)
    expected = reference(*to(made, torch.float64), scale=SCALE)
    close(run(session(forms.fused, made), made), expected, 3e-6)


def test_onnx_tables_are_shared_by_layers() -> None:
    made = inputs(9)
    first, state = reference(*to(made, torch.float64), scale=SCALE)
    second = reference(*to(made | {"v": first, "state": state}, torch.float64), scale=SCALE)
    close(run(session(forms.plain, made, layers=2), made), second, 3e-6)


def test_onnx_fused_needs_a_positive_scale() -> None:
    with pytest.raises(ValueError, match="scale is 0"):
        forms.fused(Graph(), *[None] * 6, heads=1, key_dim=1, value_dim=1, decay="none", scale=0.0)
