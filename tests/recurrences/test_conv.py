"""Short convolution: torch form, custom op and both ONNX forms against a float64 loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from edgelin.recurrences.conv import onnx as conv_onnx
from edgelin.recurrences.conv import short_convolution
from edgelin.recurrences.graph import Graph

CHANNELS, WIDTH = 6, 4


def inputs(batch: int, time: int, width: int = WIDTH, bias: bool = True) -> list[Tensor | None]:
    """x, weight, bias, state in float64; the state is not zero."""
    generator = torch.Generator().manual_seed(time)
    shapes = [(batch, time, CHANNELS), (CHANNELS, width), (CHANNELS,), (batch, CHANNELS, width - 1)]
    made: list[Tensor | None] = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    ]
    if not bias:
        made[2] = None
    return made


def loop(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """The equation in numpy, index by index."""
    past = np.concatenate([state.numpy().transpose(0, 2, 1), x.numpy()], axis=1)
    width = weight.shape[1]
    y = np.zeros(x.shape)
    for t in range(x.shape[1]):
        for i in range(width):
            y[:, t] += weight.numpy()[:, i] * past[:, t + i]
    if bias is not None:
        y += bias.numpy()
    if activation == "silu":
        y = y / (1 + np.exp(-y))
    return y, past[:, past.shape[1] - width + 1 :].transpose(0, 2, 1)


def cast(tensors: list[Tensor | None], dtype: torch.dtype) -> list[Any]:
    """All tensors in ``dtype``."""
    return [None if t is None else t.to(dtype) for t in tensors]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch, time", [(1, 1), (3, 2), (1, 63), (3, 64), (1, 65), (3, 130)])
def test_torch_form_is_the_equation(
    batch: int, time: int, bias: bool, activation: str | None
) -> None:
    made = inputs(batch, time, bias=bias)
    y, tail = short_convolution(*cast(made, torch.float64), activation=activation)
    expected = loop(*made, activation)  # type: ignore[arg-type]
    np.testing.assert_allclose(y, expected[0], atol=1e-12)
    np.testing.assert_array_equal(tail, expected[1])
    single, _ = short_convolution(*cast(made, torch.float32), activation=activation)
    np.testing.assert_allclose(single, expected[0], atol=2e-5)


def test_reference_is_the_equation() -> None:
    from edgelin.recurrences.conv import reference

    made = inputs(3, 9)
    y, tail = reference.short_convolution(*cast(made, torch.float64), activation="silu")
    expected = loop(*made, "silu")  # type: ignore[arg-type]
    np.testing.assert_allclose(y, expected[0], atol=1e-12)
    np.testing.assert_array_equal(tail, expected[1])


def test_bfloat16_input_keeps_a_float32_state() -> None:
    x, weight, bias, state = cast(inputs(3, 9), torch.float32)
    y, tail = short_convolution(x.bfloat16(), weight, bias, state, activation="silu")
    assert y.dtype == torch.bfloat16
    assert tail.dtype == torch.float32
    np.testing.assert_array_equal(tail, x[:, -3:].bfloat16().float().transpose(1, 2))


def test_gradients() -> None:
    made = [t.requires_grad_() for t in inputs(2, 5) if t is not None]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return short_convolution(*tensors, activation="silu")

    assert torch.autograd.gradcheck(call, tuple(made))


def test_custom_op_passes_the_op_checks() -> None:
    for made in (inputs(2, 3), inputs(2, 3, bias=False)):
        torch.library.opcheck(
            torch.ops.edgelin.short_convolution.default,
            (*cast(made, torch.float32), "silu"),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'relu'"):
        short_convolution(*cast(inputs(1, 1), torch.float32), activation="relu")


def session(form: Callable[..., Any], weight: Tensor, bias: Tensor | None, activation: str | None):  # type: ignore[no-untyped-def]
    """An onnxruntime session of one node group with inputs x and state."""
    channels, width = weight.shape
    kind = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", shape=ir.Shape(["batch", "time", channels]), type=kind)
    state = ir.Value(name="state", shape=ir.Shape(["batch", channels, width - 1]), type=kind)
    time = ir.node("Shape", [x], attributes={"start": 1, "end": 2})
    graph = Graph(time.outputs[0])
    outputs = form(
        graph,
        x,
        graph.const(weight.numpy()),
        None if bias is None else graph.const(bias.numpy()),
        state,
        channels=channels,
        width=width,
        activation=activation,
    )
    for value, name, like in zip(outputs, ("y", "tail"), (x, state), strict=True):
        value.name, value.shape, value.type = name, like.shape, kind
    model = ir.Graph(
        [x, state],
        outputs,
        nodes=[time, *graph.preamble, *graph.nodes],
        initializers=list(graph.initializers.values()),
        opset_imports={"": 21, "com.microsoft": 1},
        name="conv",
    )
    proto = ir.to_proto(ir.Model(model, ir_version=9))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("form", [conv_onnx.plain, conv_onnx.fused])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("bias, activation", [(True, None), (False, "silu")])
def test_onnx_forms(
    form: Callable[..., Any], width: int, bias: bool, activation: str | None
) -> None:
    _, weight, bias_, _ = cast(inputs(1, 1, width, bias), torch.float32)
    runner = session(form, weight, bias_, activation)
    for batch, time in [(1, 1), (3, 2), (1, 7), (3, 63), (1, 64)]:
        x, _, _, state = cast(inputs(batch, time, width), torch.float32)
        y, tail = runner.run(None, {"x": x.numpy(), "state": state.numpy()})
        wide = cast([x, weight, bias_, state], torch.float64)
        expected = loop(*wide, activation)
        np.testing.assert_allclose(y, expected[0], atol=5e-6)
        np.testing.assert_array_equal(tail, expected[1].astype(np.float32))
