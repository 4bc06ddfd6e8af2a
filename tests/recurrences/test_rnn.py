"""Non-linear recurrence: torch loop, custom op, kernels and ONNX form against a float64 loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from edgelin.recurrences.graph import Graph
from edgelin.recurrences.rnn import ACTIVATIONS, rnn
from edgelin.recurrences.rnn import onnx as forms

TIMES = (1, 63, 64, 65, 130)
FORMS = ("elementwise", "full")
CASES = [(form, f) for form in FORMS for f in ACTIVATIONS]
Arrays = dict[str, np.ndarray]


def inputs(form: str, time: int, batch: int = 2, channels: int = 5) -> Arrays:
    """Random inputs with weights of both signs and a state that is not zero."""
    random = np.random.default_rng(time)
    a = random.uniform(-1, 1, channels)
    w = np.linalg.qr(random.standard_normal((channels, channels)))[0] * 0.9
    return {
        "u": random.standard_normal((batch, time, channels)),
        "weight": a if form == "elementwise" else w,
        "state": random.standard_normal((batch, channels)),
    }


def hard(kind: str, made: Arrays) -> Arrays:
    """Inputs at the ends of what a network meets."""
    scale = np.sign(made["weight"]) if made["weight"].ndim == 1 else made["weight"] / 0.9
    return (
        made
        | {
            "silence": {"u": 0 * made["u"]},
            "no memory": {"weight": 0 * made["weight"]},
            "no decay": {"weight": scale},
            "equal tokens": {"u": np.broadcast_to(made["u"][:, :1], made["u"].shape).copy()},
            "saturated": {"u": 40 * made["u"]},
        }[kind]
    )


HARD = ("silence", "no memory", "no decay", "equal tokens", "saturated")


def f(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f and its derivative."""
    if name == "tanh":
        return np.tanh(x), np.cosh(np.clip(x, -300, 300)) ** -2
    if name == "relu":
        return np.where(x > 0, x, 0), np.where(x > 0, 1.0, 0.0)
    if name == "sigmoid":
        low = np.exp(-np.abs(x))
        return np.where(x < 0, low, 1) / (1 + low), low / (1 + low) ** 2
    return x, np.ones_like(x)


def loop(made: Arrays, name: str, dz: np.ndarray, dstate: np.ndarray) -> Arrays:
    """Outputs, the last state and all gradients, by the equation and the chain rule."""
    u, weight, z = made["u"], made["weight"], made["state"]
    w = np.diag(weight) if weight.ndim == 1 else weight
    states, slopes = [z], []
    for t in range(u.shape[1]):
        z, slope = f(name, states[-1] @ w + u[:, t])
        states.append(z)
        slopes.append(slope)
    du, dw, e = np.zeros_like(u), np.zeros_like(w), dstate
    for t in reversed(range(u.shape[1])):
        du[:, t] = (dz[:, t] + e) * slopes[t]
        dw += states[t].T @ du[:, t]
        e = du[:, t] @ w.T
    return {
        "z": np.stack(states[1:], axis=1),
        "after": z,
        "du": du,
        "dweight": np.diag(dw) if weight.ndim == 1 else dw,
        "dstate": e,
    }


def output_gradients(made: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Random gradients of z and of the last state."""
    random = np.random.default_rng(7)
    return random.standard_normal(made["u"].shape), random.standard_normal(made["state"].shape)


def tensors(made: Arrays, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """The inputs as leaves."""
    return {
        n: torch.tensor(x, dtype=dtype, device=device).requires_grad_() for n, x in made.items()
    }


def by_op(made: Arrays, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """What ``loop`` returns, by the public function and autograd."""
    leaves = tensors(made, dtype)
    z, after = rnn(**leaves, activation=name)
    outward = [torch.tensor(x, dtype=dtype) for x in output_gradients(made)]
    grads = torch.autograd.grad([z, after], list(leaves.values()), outward)
    return dict(zip(("z", "after", "du", "dweight", "dstate"), (z, after, *grads), strict=True))


def by_kernels(made: Arrays, name: str, device: str, u_dtype: torch.dtype) -> dict[str, Tensor]:
    """The same by the Triton kernels."""
    from edgelin.recurrences.rnn import kernel, kernel_backward

    given = {n: x.detach() for n, x in tensors(made, torch.float32, device).items()}
    given["u"] = given["u"].to(u_dtype)
    z, after = kernel.forward(**given, activation=name)
    dz, dstate = (torch.tensor(x, dtype=torch.float32) for x in output_gradients(made))
    grads = kernel_backward.backward(
        **given, activation=name, dz=dz.to(device, u_dtype), dstate=dstate.to(device)
    )
    assert z.dtype == grads[0].dtype == u_dtype and after.dtype == torch.float32
    return dict(zip(("z", "after", "du", "dweight", "dstate"), (z, after, *grads), strict=True))


def check(got: dict[str, Tensor], expected: Arrays, tolerance: float, least: float = 1e-6) -> None:
    """All agree, relative to the largest entry, or to ``least`` where it is smaller."""
    for name, array in expected.items():
        result = got[name].detach().cpu().double().numpy()
        scale = max(np.abs(array).max(), least)
        np.testing.assert_allclose(result, array, rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.parametrize("form, name", CASES)
@pytest.mark.parametrize("time", TIMES)
def test_op_is_the_loop(form: str, name: str, time: int) -> None:
    made = inputs(form, time, batch=1 if time == 64 else 3)
    expected = loop(made, name, *output_gradients(made))
    check(by_op(made, name, torch.float64), expected, 1e-11)
    check(by_op(made, name, torch.float32), expected, 1e-5)


@pytest.mark.parametrize("form, name", CASES)
@pytest.mark.parametrize("kind", HARD)
def test_hard_inputs_are_the_loop(form: str, name: str, kind: str) -> None:
    made = hard(kind, inputs(form, 65))
    check(by_op(made, name, torch.float64), loop(made, name, *output_gradients(made)), 1e-10)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("time, channels", [(1, 5), (8, 32), (19, 33)])
def test_kernels_are_the_loop(name: str, time: int, channels: int, device: str) -> None:
    made = inputs("elementwise", time, channels=channels)
    made["u"] = torch.tensor(made["u"]).bfloat16().double().numpy()  # relu's kink stays where it is
    expected = loop(made, name, *output_gradients(made))
    check(by_kernels(made, name, device, torch.float32), expected, 1e-5)
    # The states are float32, only what is read and written is rounded.
    check(by_kernels(made, name, device, torch.bfloat16), expected, 1e-2)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("kind", HARD)
def test_kernels_bear_hard_inputs(name: str, kind: str, device: str) -> None:
    made = hard(kind, inputs("elementwise", 17))
    expected = loop(made, name, *output_gradients(made))
    # A float32 z near 1 holds no small 1 - z^2.
    check(by_kernels(made, name, device, torch.float32), expected, 2e-5, least=1e-2)


def test_kernel_tanh_keeps_its_digits(device: str) -> None:
    from edgelin.recurrences.rnn import kernel

    x = torch.cat([torch.logspace(-8, 2, 60), torch.linspace(0.15, 0.25, 40)])[None, None]
    zero = torch.zeros(x.shape[2], device=device)
    z, _ = kernel.forward(torch.cat([x, -x], 0).to(device), zero, zero.expand(2, -1), "tanh")
    expected = np.tanh(x.double().numpy())
    np.testing.assert_allclose(z.cpu(), np.concatenate([expected, -expected]), rtol=1e-6)


@pytest.mark.parametrize("form, name", CASES)
def test_pieces_are_one_call(form: str, name: str) -> None:
    made = {n: x.detach() for n, x in tensors(inputs(form, 70), torch.float32).items()}
    whole, after = rnn(**made, activation=name)
    state, outputs = made["state"], []
    for piece in made["u"].split([1, 64, 5], dim=1):
        z, state = rnn(piece, made["weight"], state, activation=name)
        outputs.append(z)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(state, after, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_inputs_keep_a_float32_state(form: str) -> None:
    made = {n: x.detach() for n, x in tensors(inputs(form, 130), torch.float32).items()}
    made["u"] = made["u"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        z, after = rnn(**made, activation="tanh")
    exact, state = rnn(made["u"].float(), made["weight"], made["state"], activation="tanh")
    assert z.dtype == torch.bfloat16 and after.dtype == torch.float32
    torch.testing.assert_close(after, state, rtol=0, atol=0)
    torch.testing.assert_close(z, exact.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_op_registrations(form: str) -> None:
    leaves = tensors(inputs(form, 4), torch.float32)
    torch.library.opcheck(torch.ops.edgelin.rnn, (*leaves.values(), "tanh"))


@pytest.mark.parametrize("form, name", CASES)
def test_onnx_is_the_loop(form: str, name: str) -> None:
    runner = session(form, name, inputs(form, 1)["weight"])
    for time, batch in ((1, 1), (64, 3), (65, 1), (130, 3)):
        made = inputs(form, time, batch)
        weight = inputs(form, 1)["weight"]
        expected = loop(made | {"weight": weight}, name, *output_gradients(made))
        feeds = {n: made[n].astype(np.float32) for n in ("u", "state")}
        z, after = runner.run(None, feeds)
        np.testing.assert_allclose(z, expected["z"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(after, expected["after"], rtol=0, atol=1e-5)


def session(form: str, name: str, matrix: np.ndarray) -> ort.InferenceSession:
    """The ONNX form with the weight as an initializer."""
    graph, channels = Graph(), len(matrix)

    def value(name: str, shape: list[Any]) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))

    u, state = value("u", ["batch", "time", channels]), value("state", ["batch", channels])
    weight = graph.const(matrix)
    outputs = forms.plain(
        graph, u, weight, state, channels=channels, full=form == "full", activation=name
    )
    for output in outputs:
        output.type = ir.TensorType(ir.DataType.FLOAT)
    model = ir.Model(
        ir.Graph(
            [u, state],
            list(outputs),
            nodes=graph.nodes,
            initializers=list(graph.initializers.values()),
            opset_imports={"": 21},
        ),
        ir_version=9,
    )
    data = ir.serde.serialize_model(model).SerializeToString()
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"])


def test_other_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="activation is 'gelu'; allowed: identity, tanh"):
        rnn(torch.zeros(1, 2, 5), torch.zeros(5), torch.zeros(1, 5), activation="gelu")
