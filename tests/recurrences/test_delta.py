"""Delta rule: chunked form, custom op, kernels and ONNX forms against a float64 loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from comparisons import Inputs, error, out_gradients, rounded, to
from delta_cases import (
    HARD,
    SCALE,
    close,
    inputs,
    run,
    session,
    with_gradients,
)
from torch import Tensor

from edgelin.recurrences.chunks import unit_lower_inverse
from edgelin.recurrences.delta import delta
from edgelin.recurrences.delta import onnx as forms
from edgelin.recurrences.delta.reference import reference
from edgelin.recurrences.graph import Graph


def kernel_results(made: Inputs, dtype: torch.dtype, device: str) -> list[Tensor]:
    """What ``with_gradients`` returns, from the kernels."""
    from edgelin.recurrences.delta import kernel, kernel_backward

    arguments = to(made, dtype, device)
    do, dstate = out_gradients(made)
    *outputs, carried = kernel.forward(*arguments, SCALE)
    ups = do.to(device, dtype), dstate.to(device, torch.float32)
    gradients = list(kernel_backward.backward(*arguments, SCALE, *ups, carried))
    again = kernel_backward.backward(*arguments, SCALE, *ups)
    assert all(map(torch.equal, gradients, again))
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
