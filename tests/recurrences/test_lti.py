"""Every form of the dense LTI recurrence against a float64 numpy loop over tokens."""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.recurrences.graph import Graph
from edgelin.recurrences.lti import chunked, hippo, lti, onnx
from edgelin.recurrences.lti.diagonalise import condition, diagonalise
from edgelin.recurrences.lti.discretise import check_method, discretise

Inputs = dict[str, Tensor]
NAMES = ("x", "a", "b", "c", "state")
HARD = ("zero input", "no decay", "nilpotent", "forgets", "integrator")


def inputs(time: int, *, batch: int = 2, channels: int = 3, size: int = 4) -> Inputs:
    """Random inputs, float64; the transitions turn and shrink by up to a tenth a token."""
    g = torch.Generator().manual_seed(time + size)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    w = normal(channels, size, size)
    a = torch.matrix_exp(0.3 * (w - w.mT) - 0.02 * w @ w.mT)
    return {
        "x": normal(batch, time, channels),
        "a": a,
        "b": normal(channels, size),
        "c": normal(channels, size),
        "state": normal(batch, channels, size),
    }


def hard(kind: str, made: Inputs) -> Inputs:
    """The inputs with one of the hard properties."""
    a, size = made["a"], made["a"].shape[-1]
    shift = torch.diag(torch.ones(size - 1, dtype=a.dtype), 1)
    return (
        made
        | {
            "zero input": {"x": torch.zeros_like(made["x"])},
            "no decay": {"a": torch.linalg.qr(a)[0]},
            "nilpotent": {"a": shift.expand_as(a)},
            "forgets": {"a": math.exp(-20) * a},
            "integrator": {"a": torch.eye(size, dtype=a.dtype).expand_as(a)},
        }[kind]
    )


def loop(made: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """y and the last state."""
    x, a, b, c, h = (made[name].double().numpy() for name in NAMES)
    outputs = []
    for t in range(x.shape[1]):
        h = np.einsum("dnm,bdm->bdn", a, h) + b * x[:, t, :, None]
        outputs.append(np.einsum("dn,bdn->bd", c, h))
    return np.stack(outputs, axis=1), h


def error(got: Tensor, expected: np.ndarray) -> float:
    """Largest difference beside the largest value."""
    return float(np.abs(got.double().numpy() - expected).max() / max(np.abs(expected).max(), 1e-9))


def single(made: Inputs) -> Inputs:
    """x and state as a model gives them; the weights stay in float64."""
    return made | {name: made[name].float() for name in ("x", "state")}


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks at lengths that a test can take."""
    monkeypatch.setattr(chunked, "BLOCK", 32)


@pytest.mark.parametrize("batch, size", [(1, 5), (3, 1), (2, 4)])
@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 130, 1100])
def test_convolution_form(time: int, batch: int, size: int) -> None:
    made = inputs(time, batch=batch, size=size)
    for given, tolerance in ((made, 1e-12), (single(made), 2e-6)):
        for got, expected in zip(lti(**given), loop(made), strict=True):
            assert got.dtype == given["x"].dtype and got.is_contiguous()
            assert error(got, expected) < tolerance


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("kind", HARD)
def test_convolution_form_at_hard_inputs(kind: str) -> None:
    made = hard(kind, inputs(130))
    for got, expected in zip(lti(**single(made)), loop(made), strict=True):
        assert error(got, expected) < 2e-6


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("cuts", [range(101), (0, 37, 100), (0, 1, 100)])
def test_pieces_are_the_whole(cuts: list[int]) -> None:
    made = inputs(100)
    expected, last = loop(made)
    outputs, state = [], made["state"].float()
    for a, z in itertools.pairwise(cuts):
        y, state = lti(**single(made) | {"x": made["x"][:, a:z].float(), "state": state})
        outputs.append(y)
    assert error(torch.cat(outputs, dim=1), expected) < 2e-6
    assert error(state, last) < 2e-6


def test_bfloat16_input_keeps_a_float32_state() -> None:
    made = inputs(70)
    made["x"] = made["x"].bfloat16()
    expected, last = loop(made)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = lti(**made | {"state": made["state"].float()})
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert error(y, expected) < 4e-3
    assert error(state, last) < 1e-5


def token_by_token(made: Inputs) -> tuple[Tensor, Tensor]:
    """The loop in torch, for its gradients."""
    h, outputs = made["state"], []
    for t in range(made["x"].shape[1]):
        h = torch.einsum("dnm,bdm->bdn", made["a"], h) + made["b"] * made["x"][:, t, :, None]
        outputs.append((made["c"] * h).sum(-1))
    return torch.stack(outputs, dim=1), h


def gradients(form: object, made: Inputs) -> list[Tensor]:
    """Of a fixed weighting of outputs and states, in the order of NAMES."""
    leaves = {name: made[name].detach().clone().requires_grad_() for name in NAMES}
    y, state = form(leaves)  # type: ignore[operator]
    g = torch.Generator().manual_seed(9)
    total = torch.zeros((), dtype=torch.float64)
    for v in (y, state):
        total = total + (v * torch.randn(v.shape, generator=g, dtype=torch.float64)).sum()
    return list(torch.autograd.grad(total, list(leaves.values())))


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("time", [1, 31, 70])
def test_gradients(time: int) -> None:
    made = inputs(time)
    expected = gradients(token_by_token, made)
    for given, tolerance in ((made, 1e-11), (single(made), 1e-5)):
        got = gradients(lambda leaves: lti(**leaves), given)
        for name, found, wanted in zip(NAMES, got, expected, strict=True):
            assert found.dtype == given[name].dtype
            assert error(found, wanted.numpy()) < tolerance, name


@pytest.mark.usefixtures("short_blocks")
def test_gradcheck_and_op_checks() -> None:
    leaves = tuple(v.requires_grad_() for v in inputs(35, batch=1, channels=1, size=2).values())
    assert torch.autograd.gradcheck(lti, leaves)
    torch.library.opcheck(torch.ops.edgelin.lti.default, leaves)


def test_wrong_shapes_are_refused() -> None:
    made = inputs(2)
    with pytest.raises(ValueError, match=r"need \[D, N, N\], \[D, N\]"):
        lti(**made | {"b": made["b"][0]})
    for x in (made["x"][:1], made["x"][0], made["x"][..., :1]):
        with pytest.raises(ValueError, match=r"need \[B, T, D\]"):
            lti(**made | {"x": x})


# ---- discretisation, HiPPO matrices, diagonalisation


@pytest.mark.parametrize("kind", ["random", "singular", "stiff"])
def test_discretisation_is_that_of_the_differential_equation(kind: str) -> None:
    made = inputs(1)
    a = {"random": made["a"] - 2, "singular": 0 * made["a"], "stiff": -300 * made["a"]}[kind]
    b, dt = made["b"], torch.tensor([1e-3, 0.02, 0.3])
    step, eye = dt.double().numpy()[:, None, None], np.eye(4)
    # 2^20 steps of the midpoint rule, by squaring (h, x) -> (h, x)
    system = np.zeros((3, 5, 5))
    system[:, :4, :4], system[:, :4, 4] = a, b
    tiny = system * step / 2**20
    one = np.eye(5) + tiny + tiny @ tiny / 2
    for _ in range(20):
        one = one @ one
    transition, write = discretise(a, b, dt, "zoh")
    assert error(transition, one[:, :4, :4]) < 1e-8
    assert error(write, one[:, :4, 4]) < 1e-8
    inverse = np.linalg.inv(eye - step / 2 * a.numpy())
    transition, write = discretise(a, b, dt, "bilinear")
    assert error(transition, inverse @ (eye + step / 2 * a.numpy())) < 1e-12
    assert error(write, (inverse @ b.numpy()[..., None] * step)[..., 0]) < 1e-12


def test_unknown_discretisation_is_refused() -> None:
    with pytest.raises(EdgelinError, match="discretization is 'euler'; give one of zoh, bilinear"):
        check_method("euler")


def test_hippo_matrices() -> None:
    a, b = hippo.legs(3)
    r3, r5, r15 = 3**0.5, 5**0.5, 15**0.5
    np.testing.assert_allclose(a, [[-1, 0, 0], [-r3, -2, 0], [-r5, -r15, -3]])
    np.testing.assert_allclose(b, [1, r3, r5])
    normal, half = hippo.normal_legs(8)
    a, b = hippo.legs(8)
    np.testing.assert_allclose(normal, a + torch.outer(b, b) / 2, atol=1e-12)
    np.testing.assert_allclose(normal @ normal.T, normal.T @ normal, atol=1e-12)
    np.testing.assert_allclose(half, b / 2)
    a, b = hippo.legt(2)
    np.testing.assert_allclose(a, [[-1, r3], [-r3, -3]])
    np.testing.assert_allclose(b, [1, r3])
    for make in (hippo.legs, hippo.legt, hippo.normal_legs):
        symmetric = make(20)[0]
        assert torch.linalg.eigvalsh(symmetric + symmetric.T).max() < 1e-9


def test_legt_remembers_a_window() -> None:
    """Its states are the Legendre coefficients of the last second, the newest at 1."""
    a, b = (v.numpy()[0] for v in discretise(*_one(hippo.legt(12)), torch.tensor([1e-3]), "zoh"))
    h = np.zeros(12)
    for t in range(3000):
        h = a @ h + b * math.sin((t + 0.5) / 1000)
    axis = np.linspace(-1, 1, 101)
    basis = [np.polynomial.legendre.Legendre.basis(n)(axis) for n in range(12)]
    window = sum(h[n] * (2 * n + 1) ** 0.5 * basis[n] for n in range(12))
    np.testing.assert_allclose(window, np.sin(3 - (1 - axis) / 2), atol=2e-3)


def _one(system: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return system[0][None], system[1][None]


def test_diagonal_form_has_the_same_taps() -> None:
    made = inputs(1, channels=4, size=5)
    made["a"][0] = torch.diag(torch.tensor([0.9, 0.5, 0.1, -0.3, -0.7]))  # real, the most entries
    modes = diagonalise(made["a"], made["b"], made["c"])
    assert modes.weights.shape == (4, 5) and not modes.is_pair[0].any()
    assert (modes.eigenvalues.imag >= 0).all()
    factor = torch.where(modes.is_pair, 2, 1)
    for lag in (0, 1, 7, 300):
        power = np.linalg.matrix_power(made["a"].numpy(), lag)
        taps = np.einsum("dn,dnm,dm->d", made["c"], power, made["b"])
        got = (factor * modes.weights * modes.eigenvalues**lag).sum(-1).real
        assert error(got, taps) < 1e-10


def test_condition_of_eigenvectors() -> None:
    turn = torch.linalg.qr(inputs(1)["a"])[0]
    assert condition(turn) == pytest.approx(1, abs=1e-9)
    known = torch.tensor([[[1.0, 1.0], [0.0, 1.01]]], dtype=torch.float64)
    vectors = np.array([[1, 1 / math.hypot(1, 0.01)], [0, 0.01 / math.hypot(1, 0.01)]])
    assert condition(known) == pytest.approx(np.linalg.cond(vectors), rel=1e-6)
    assert condition(torch.tensor([[[-1.0, 1.0], [0.0, -1.0]]])) > 1e12


# ---- ONNX


def session(made: Inputs) -> ort.InferenceSession:
    """An onnxruntime session whose weights are initializers."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    channels, size = made["b"].shape
    x = ir.Value(name="x", shape=ir.Shape(["batch", "time", channels]), type=kind)
    state = ir.Value(name="state", shape=ir.Shape(["batch", channels, size]), type=kind)
    time = ir.node("Shape", [x], attributes={"start": 1, "end": 2})
    graph = Graph(time.outputs[0])
    weights = [graph.const(made[name].numpy()) for name in "abc"]
    y, after = onnx.plain(graph, x, *weights, state, channels=channels, state_dim=size)
    for value, like, name in ((y, x, "y"), (after, state, "after")):
        value.name, value.shape, value.type = name, like.shape, kind
    model = ir.Graph(
        [x, state],
        [y, after],
        nodes=[time, *graph.preamble, *graph.nodes],
        initializers=list(graph.initializers.values()),
        opset_imports={"": 21},
        name="lti",
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    proto = ir.to_proto(ir.Model(model, ir_version=9))
    return ort.InferenceSession(proto.SerializeToString(), options)


def run(model: ort.InferenceSession, x: Tensor, state: Tensor) -> list[Tensor]:
    """y and the state."""
    found = model.run(None, {"x": x.float().numpy(), "state": state.float().numpy()})
    return [torch.from_numpy(v) for v in found]


@pytest.mark.parametrize("kind", ["random", *HARD])
def test_onnx_form(kind: str) -> None:
    made = inputs(64, size=5)
    made = made if kind == "random" else hard(kind, made)
    made = {name: v.float() for name, v in made.items()}  # only the graph's rounding is measured
    model = session(made)
    for time in range(1, 65):
        given = made | {"x": made["x"][:, :time]}
        for got, expected in zip(run(model, given["x"], given["state"]), loop(given), strict=True):
            assert error(got, expected) < 5e-6, time


def test_onnx_form_refuses_more_than_a_chunk() -> None:
    made = inputs(65)
    with pytest.raises(Exception, match="indices element out of data bounds"):
        run(session(made), made["x"], made["state"])


def test_onnx_form_refuses_computed_weights() -> None:
    graph, value = Graph(ir.Value(name="time")), ir.Value(name="v")
    with pytest.raises(ValueError, match="v is computed; trace a step form"):
        onnx.plain(graph, value, value, value, value, value, channels=1, state_dim=1)
