"""Diagonal recurrence: chunked form, custom op, kernels and ONNX forms against a float64 loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from edgelin.recurrences import launches
from edgelin.recurrences.diagonal import diagonal, reference
from edgelin.recurrences.diagonal import onnx as forms
from edgelin.recurrences.graph import Graph

NAMES = ("x", "b", "c", "g", "theta", "state")
CONSTANT = ("constant",) * 3
SELECTIVE = ("each", "shared", "shared")  # as in Mamba: Λ a channel's own, b and c for all
GATED = ("each", "each", "constant")  # as in RG-LRU, where N = 1
HGRN = ("each", "constant", "constant")  # likewise
MODES = [
    CONSTANT,
    SELECTIVE,
    GATED,
    ("shared", "each", "constant"),
    ("constant", "shared", "each"),
]
TIMES = (1, 63, 64, 65, 130)


def inputs(
    time: int,
    modes: tuple[str, ...] = CONSTANT,
    *,
    is_complex: bool,
    batch: int = 2,
    channels: int = 3,
    size: int = 2,
) -> dict[str, Tensor | None]:
    """Random float64 inputs with a state that is not zero; ``modes`` are those of Λ, b and c."""
    generator = torch.Generator().manual_seed(time)
    axes = {
        "constant": (channels, size),
        "shared": (batch, time, 1, size),
        "each": (batch, time, channels, size),
    }
    pair = (2,) if is_complex else ()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "x": draw(batch, time, channels),
        "b": draw(*axes[modes[1]], *pair),
        "c": draw(*axes[modes[2]], *pair),
        "g": -0.2 * draw(*axes[modes[0]]).abs(),
        "theta": 3 * draw(*axes[modes[0]]) if is_complex else None,
        "state": draw(batch, channels, size, *pair),
    }


def hard(kind: str, made: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Inputs at which a form that divides by a decay, or sums exponents wrongly, fails."""
    g, x = made["g"], made["x"]
    assert g is not None and x is not None
    steps = torch.arange(g.numel(), dtype=g.dtype).reshape(g.shape)
    changes: dict[str, dict[str, Tensor]] = {
        "strong decay": {"g": torch.full_like(g, -20)},
        "mixed decay": {"g": torch.where(steps % 2 == 0, -20.0, -1e-3)},
        "reset": {"g": torch.where(steps % 3 == 0, -torch.inf, -0.1)},
        "no decay": {"g": torch.zeros_like(g)},
        "silence": {"x": torch.zeros_like(x)},
    }
    return made | changes[kind]


HARD = ("strong decay", "mixed decay", "reset", "no decay", "silence")


def to(made: dict[str, Tensor | None], dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """All tensors in ``dtype`` on ``device``."""
    return {n: None if v is None else v.to(device, dtype) for n, v in made.items()}


def error(result: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    scale = expected.detach().abs().max().clamp(min=1e-30)
    return float((result.detach().cpu().double() - expected.detach()).abs().max() / scale)


def with_gradients(function: Any, made: dict[str, Tensor | None]) -> list[Tensor]:
    """y, the state and the gradients of every input for fixed random output gradients."""
    leaves = {n: None if v is None else v.clone().requires_grad_() for n, v in made.items()}
    y, state = function(**leaves)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(v.shape, generator=generator, dtype=torch.float64) for v in (y, state)]
    loss = sum(
        (v * w.to(v.device, v.dtype)).sum() for v, w in zip((y, state), weights, strict=True)
    )
    return [y, state, *torch.autograd.grad(loss, [v for v in leaves.values() if v is not None])]


def named(made: dict[str, Tensor | None]) -> list[str]:
    """Names of what ``with_gradients`` returns."""
    return ["y", "state", *(f"d{name}" for name in NAMES if made[name] is not None)]


def test_reference_is_the_equation() -> None:
    made = inputs(5, SELECTIVE, is_complex=True)
    x, b, c, g, theta, state = (made[n].numpy() for n in NAMES)  # type: ignore[union-attr]
    h = state[..., 0] + 1j * state[..., 1]
    expected = np.zeros(x.shape)
    for t, d in itertools.product(range(5), range(3)):
        transition = np.exp(g[:, t, d] + 1j * theta[:, t, d])
        h[:, d] = (
            transition * h[:, d] + (b[:, t, 0, :, 0] + 1j * b[:, t, 0, :, 1]) * x[:, t, d, None]
        )
        expected[:, t, d] = ((c[:, t, 0, :, 0] + 1j * c[:, t, 0, :, 1]) * h[:, d]).sum(-1).real
    y, after = reference.forward(**made)  # type: ignore[arg-type]
    np.testing.assert_allclose(y, expected, atol=1e-12)
    np.testing.assert_allclose(after, np.stack([h.real, h.imag], axis=-1), atol=1e-12)


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("time", TIMES)
def test_chunked_form_and_gradients(time: int, modes: tuple[str, ...], is_complex: bool) -> None:
    made = inputs(time, modes, is_complex=is_complex, batch=1 if time == 63 else 3)
    expected = with_gradients(reference.forward, made)
    exact = with_gradients(diagonal, made)
    single = with_gradients(diagonal, to(made, torch.float32))
    for name, e, d, s in zip(named(made), expected, exact, single, strict=True):
        assert error(d, e) < 1e-11, name
        assert error(s, e) < 2e-5, name
        assert s.dtype == torch.float32 and s.is_contiguous()


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("modes", MODES[:3])
@pytest.mark.parametrize("kind", HARD)
def test_chunked_form_at_hard_inputs(kind: str, modes: tuple[str, ...], is_complex: bool) -> None:
    size = 1 if modes == GATED else 2
    made = hard(kind, inputs(130, modes, is_complex=is_complex, size=size))
    expected = with_gradients(reference.forward, made)
    single = with_gradients(diagonal, to(made, torch.float32))
    for name, e, s in zip(named(made), expected, single, strict=True):
        assert error(s, e) < 5e-5, name


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("modes", MODES)
def test_gradcheck(modes: tuple[str, ...], is_complex: bool) -> None:
    made = inputs(3, modes, is_complex=is_complex, batch=1, channels=2)
    given = {n: v.requires_grad_() for n, v in made.items() if v is not None}

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return diagonal(**({"theta": None} | dict(zip(given, tensors, strict=True))))

    assert torch.autograd.gradcheck(call, tuple(given.values()))


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("modes", MODES[:2])
def test_custom_op_passes_the_op_checks(modes: tuple[str, ...], is_complex: bool) -> None:
    made = to(inputs(3, modes, is_complex=is_complex), torch.float32)
    given = tuple(None if v is None else v.requires_grad_() for v in made.values())
    torch.library.opcheck(torch.ops.edgelin.diagonal.default, given)


def test_two_halves_are_the_whole() -> None:
    made = to(inputs(100, SELECTIVE, is_complex=True), torch.float32)
    whole, after = diagonal(**made)
    halves, state = [], made["state"]
    for span in (slice(0, 37), slice(37, 100)):
        cut = {n: v[:, span] for n, v in made.items() if n != "state"}
        y, state = diagonal(**cut, state=state)
        halves.append(y)
    torch.testing.assert_close(torch.cat(halves, dim=1), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, after, atol=1e-5, rtol=1e-5)


def test_bfloat16_input_keeps_a_float32_state() -> None:
    made = inputs(70, is_complex=True)
    single = to(made, torch.float32)
    single["x"] = single["x"].bfloat16()
    expected, after = reference.forward(**(made | {"x": single["x"].double()}))  # type: ignore[arg-type]
    y, state = diagonal(**single)
    assert y.dtype == torch.bfloat16
    assert error(y, expected) < 4e-3
    assert state.dtype == torch.float32
    assert error(state, after) < 1e-5


# ---- kernels


def check_kernels(
    made: dict[str, Tensor | None],
    device: str,
    tolerance: float,
    *,
    keep: bool = True,
    **dtypes: torch.dtype,
) -> None:
    """Compare outputs and gradients of the kernels with autograd through the float64 loop."""
    from edgelin.recurrences.diagonal import kernel, kernel_backward

    given = to(made, torch.float32, device)
    given |= {n: given[n].to(dtype) for n, dtype in dtypes.items()}
    expected = with_gradients(reference.forward, to(given, torch.float64))
    generator = torch.Generator().manual_seed(1)
    y, state, kept = kernel.forward(**given)
    dy, dstate = (
        torch.randn(v.shape, generator=generator, dtype=torch.float64).to(device, v.dtype)
        for v in (y, state)
    )
    grads = kernel_backward.backward(*given.values(), dy, dstate, kept if keep else [])
    got = [y, state, *(v for n, v in zip(NAMES, grads, strict=True) if given[n] is not None)]
    likes = [given["x"], given["state"], *(v for v in given.values() if v is not None)]
    for name, e, s, like in zip(named(made), expected, got, likes, strict=True):
        assert s.dtype == like.dtype and s.shape == like.shape and s.is_contiguous()
        assert error(s, e) < tolerance, name


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several segments, and several a program, at lengths that the interpreter can take."""
    from edgelin.recurrences.diagonal import kernel, kernel_backward

    for name, value in {"SEGMENT": 4, "LONG_SEGMENT": 4}.items():
        monkeypatch.setattr(kernel, name, value)
    monkeypatch.setattr(kernel_backward, "SEGMENT", 4)
    monkeypatch.setattr(kernel_backward, "PROGRAMS", 2)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("modes", MODES)
def test_kernels(modes: tuple[str, ...], is_complex: bool, device: str) -> None:
    made = inputs(10, modes, is_complex=is_complex, batch=1, channels=3, size=3)
    check_kernels(made, device, 5e-6)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("kind", HARD)
def test_kernels_at_hard_inputs(kind: str, is_complex: bool, device: str) -> None:
    modes = ("each", "shared", "constant") if is_complex else SELECTIVE
    made = inputs(6, modes, is_complex=is_complex, batch=1, channels=2)
    check_kernels(hard(kind, made), device, 5e-6)


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of the kernels with one state a channel that the interpreter can take."""
    from edgelin.recurrences.diagonal import kernel_gates

    tile = {"BT": 4, "BD": 16, "num_warps": 1}
    rules = {"outputs": tile, "gradients": tile | {"BT": 2}, "totals": tile}
    monkeypatch.setattr(kernel_gates, "SEGMENT", 4)
    monkeypatch.setattr(kernel_gates, "RULES", {n: {"lanes": 48} | r for n, r in rules.items()})
    launches.forget()
    yield
    launches.forget()


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("modes", [GATED, HGRN])
@pytest.mark.parametrize(
    "time, batch, channels",
    [(1, 1, 1), (4, 3, 3), (13, 1, 20), (13, 1, 3), (10, 3, 3)],  # one to four segments
)
def test_kernels_of_one_state(
    time: int, batch: int, channels: int, modes: tuple[str, ...], device: str
) -> None:
    size = {"channels": channels, "size": 1}
    made = inputs(time, modes, is_complex=False, batch=batch, **size)
    check_kernels(made, device, 5e-6)


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("kind", HARD)
def test_kernels_of_one_state_at_hard_inputs(kind: str, device: str) -> None:
    made = inputs(20, GATED, is_complex=False, batch=1, channels=20, size=1)  # 3 and 2 tiles
    check_kernels(hard(kind, made), device, 5e-6)


@pytest.mark.usefixtures("short_tiles")
def test_kernels_of_one_state_compute_again_what_was_not_kept(device: str) -> None:
    made = inputs(9, HGRN, is_complex=False, batch=1, size=1)
    check_kernels(made, device, 5e-6, keep=False)


def test_kernels_one_token_of_bfloat16(device: str) -> None:
    made = inputs(1, SELECTIVE, is_complex=True, batch=3)
    check_kernels(made, device, 1e-2, x=torch.bfloat16, b=torch.bfloat16, c=torch.bfloat16)


def test_kernels_over_several_channel_blocks(device: str) -> None:
    from edgelin.recurrences.diagonal import kernel

    assert kernel.prepare(  # 17 channels of 32 states: two blocks, the second ragged
        **to(inputs(2, SELECTIVE, is_complex=False, channels=17, size=32), torch.float32),
        elements=512,
        longest=kernel.SEGMENT,
    ).shape.blocks == 2  # fmt: skip
    check_kernels(inputs(2, SELECTIVE, is_complex=False, channels=17, size=32), device, 5e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize(
    "channels, size, modes",
    [
        (130, 1, GATED),
        (130, 1, HGRN),
        (96, 16, CONSTANT),
        (96, 16, SELECTIVE),
        (40, 64, ("shared", "each", "constant")),
        (24, 128, CONSTANT),
    ],
)
def test_kernels_at_real_sizes(
    channels: int, size: int, modes: tuple[str, ...], is_complex: bool
) -> None:
    for time in (1, 63, 64, 65, 300):
        made = inputs(time, modes, is_complex=is_complex, batch=3, channels=channels, size=size)
        check_kernels(made, "cuda", 2e-5)
    check_kernels(made, "cuda", 2e-2, x=torch.bfloat16)


# ---- ONNX


def session(form: str, made: dict[str, Tensor | None]) -> ort.InferenceSession:
    """An onnxruntime session in which every tensor is an input, constants are initializers."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    state, x = made["state"], made["x"]
    assert state is not None and x is not None
    probe = ir.Value(name="x", shape=ir.Shape(["batch", "time", x.shape[2]]), type=kind)
    time = ir.node("Shape", [probe], attributes={"start": 1, "end": 2})
    graph = Graph(time.outputs[0])
    given: dict[str, ir.Value | None] = {"x": probe}
    for name in NAMES[1:]:
        value = made[name]
        if value is None:
            given[name] = None
        elif name == "state" or value.dim() > 3:
            axes = (
                ["batch", *value.shape[1:]]
                if name == "state"
                else ["batch", "time", *value.shape[2:]]
            )
            given[name] = ir.Value(name=name, shape=ir.Shape(axes), type=kind)
        else:
            given[name] = graph.const(value.numpy())
    fed = [v for n, v in given.items() if v is not None and v.const_value is None]
    y, after = getattr(forms, form)(
        graph, *given.values(), channels=x.shape[2], state_dim=state.shape[2]
    )
    y.name, after.name = "y", "after"
    y.shape, after.shape = probe.shape, ir.Shape(["batch", *state.shape[1:]])
    y.type = after.type = kind
    model = ir.Graph(
        fed,
        [y, after],
        nodes=[time, *graph.preamble, *graph.nodes],
        initializers=list(graph.initializers.values()),
        opset_imports={"": 21, "com.microsoft": 1},
        name="diagonal",
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    proto = ir.to_proto(ir.Model(model, ir_version=9))
    return ort.InferenceSession(proto.SerializeToString(), options)


def run(model: ort.InferenceSession, made: dict[str, Tensor | None]) -> list[Tensor]:
    """y and the state."""
    feeds = {i.name: to(made, torch.float32)[i.name].numpy() for i in model.get_inputs()}
    return [torch.from_numpy(v) for v in model.run(None, feeds)]


CASES = [  # fused differs from plain for real selective weights only
    *(("plain", modes, is_complex) for modes in MODES for is_complex in (False, True)),
    *(("fused", modes, False) for modes in MODES),
    ("fused", SELECTIVE, True),
]


@pytest.mark.parametrize("form, modes, is_complex", CASES)
def test_onnx_form(form: str, modes: tuple[str, ...], is_complex: bool) -> None:
    random = [("random", time) for time in (1, 7, 63, 64)]
    for kind, time in [*random, *itertools.product(HARD, (1, 64))]:
        batch, size = 3 if time == 7 else 1, 1 if modes == GATED else 2
        made = inputs(time, modes, is_complex=is_complex, batch=batch, size=size)
        if kind != "random":
            made = hard(kind, made)
        # float32 inputs are the given, so that only the graph's own rounding is measured
        made = to(to(made, torch.float32), torch.float64)
        for name, got, expected in zip(
            ("y", "state"), run(session(form, made), made), reference.forward(**made), strict=True
        ):
            assert error(got, expected) < 1e-5, (kind, time, name)


@pytest.mark.parametrize("form, modes, is_complex", CASES)
def test_onnx_form_refuses_more_than_a_chunk(
    form: str, modes: tuple[str, ...], is_complex: bool
) -> None:
    made = inputs(65, modes, is_complex=is_complex)
    model = session(form, made)
    if form == "fused" and not is_complex and modes != CONSTANT:
        expected = reference.forward(**made)[0]  # type: ignore[arg-type]
        assert error(run(model, made)[0], expected) < 1e-5
        return
    with pytest.raises(Exception, match="indices element out of data bounds"):
        run(model, made)
