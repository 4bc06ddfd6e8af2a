"""What is special to the ``lti`` mixer: four forms that agree, and what can't be diagonalised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from export_models import session
from torch import Tensor

from edgelin import checkpoint as checkpoints
from edgelin import mixers, tokenizer
from edgelin.cli import main
from edgelin.config import ModelConfig, OptimConfig
from edgelin.errors import EdgelinError
from edgelin.export.bundle import export_checkpoint
from edgelin.mixers.lti import MOST_CONDITION
from edgelin.model import SequenceModel
from edgelin.recurrences.diagonal import onnx as diagonal_onnx
from edgelin.recurrences.graph import Graph
from edgelin.recurrences.lti import hippo
from edgelin.recurrences.lti import onnx as lti_onnx
from edgelin.recurrences.lti.diagonalise import condition
from edgelin.runtimes import load
from edgelin.train import optimizer

HIDDEN, CHANNELS, SIZE = 10, 6, 8
METHODS = ("zoh", "bilinear")
LONG = 4096


def build(size: int = SIZE, **more: Any) -> Any:
    """A mixer off its initial values."""
    torch.manual_seed(3)
    table = {"type": "lti", "inner_size": CHANNELS, "state_size": size, **more}
    mixer = mixers.build(table, HIDDEN, 2, 1e-6, where="model.mixers.m")
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name in ("A_skew", "A_root", "B", "D"):
                parameter += 0.1 * torch.randn_like(parameter)
    return mixer.requires_grad_(False)


# ---- four forms


def dense_loop(mixer: Any, u: np.ndarray) -> np.ndarray:
    """The recurrence in float64 from a zero state, its matrices by eigenvectors in numpy."""
    w = {n: p.double().numpy() for n, p in mixer.named_parameters()}
    skew = (w["A_skew"] - w["A_skew"].swapaxes(1, 2)) / 2
    a = skew - w["A_root"] @ w["A_root"].swapaxes(1, 2) - 1e-4 * np.eye(skew.shape[-1])
    dt = np.exp(w["log_dt"])[:, None]
    values, vectors = np.linalg.eig(a)
    b = np.linalg.solve(vectors, w["B"][..., None].astype(complex))[..., 0]
    if mixer.config.discretization == "zoh":
        step, b = np.exp(dt * values), np.expm1(dt * values) / values * b
    else:
        step, b = (2 + dt * values) / (2 - dt * values), 2 * dt / (2 - dt * values) * b
    discrete = (vectors * step[:, None] @ np.linalg.inv(vectors)).real
    write = (vectors @ b[..., None])[..., 0].real
    h, outputs = np.zeros_like(write), []
    for x in u:
        h = (discrete @ h[..., None])[..., 0] + write * x[:, None]
        outputs.append((w["C"] * h).sum(-1))
    return np.stack(outputs)


def graph_of(form: Any) -> Any:
    """An onnxruntime session of a step form's recurrence: x and states in, y and states out."""
    kind, form = ir.TensorType(ir.DataType.FLOAT), form.requires_grad_(False)
    size = form.C.shape[1]
    x = ir.Value(name="x", shape=ir.Shape(["batch", "time", CHANNELS]), type=kind)
    time = ir.node("Shape", [x], attributes={"start": 1, "end": 2})
    graph = Graph(time.outputs[0])
    sizes = {"channels": CHANNELS, "state_dim": size}
    if form.C.dim() == 3:
        state = ir.Value(name="h", shape=ir.Shape(["batch", CHANNELS, size, 2]), type=kind)
        weights = [graph.const(v.numpy()) for v in form.transition()]
        y, after = diagonal_onnx.plain(graph, x, *weights, state, **sizes)
    else:
        state = ir.Value(name="h", shape=ir.Shape(["batch", CHANNELS, size]), type=kind)
        weights = [graph.const(v.numpy()) for v in (form.A, form.B, form.C)]
        y, after = lti_onnx.plain(graph, x, *weights, state, **sizes)
    for value, like, name in ((y, x, "y"), (after, state, "after")):
        value.name, value.shape, value.type = name, like.shape, kind
    nodes = [time, *graph.preamble, *graph.nodes]
    inner = ir.Graph(
        [x, state],
        [y, after],
        nodes=nodes,
        initializers=list(graph.initializers.values()),
        opset_imports={"": 21},
        name="form",
    )
    return session(ir.Model(inner, ir_version=9))


def fed(runner: Any, u: np.ndarray, length: int) -> np.ndarray:
    """All outputs of a session that is fed ``length`` tokens a call."""
    shape = [1, *runner.get_inputs()[1].shape[1:]]
    state, outputs = np.zeros(shape, np.float32), []
    for start in range(0, len(u), length):
        x = u[None, start : start + length].astype(np.float32)
        y, state = runner.run(None, {"x": x, "h": state})
        outputs.append(y[0])
    return np.concatenate(outputs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("init, size", [("s4d-legs", 16), ("s4d-legs", 7), ("hippo-legs", 4)])
def test_the_four_forms_agree_over_a_long_stream(init: str, size: int, method: str) -> None:
    mixer = build(size, init=init, discretization=method)
    assert condition(mixer.continuous()) < MOST_CONDITION
    u = np.random.default_rng(0).standard_normal((LONG, CHANNELS))
    expected = dense_loop(mixer, u)
    scale = np.abs(expected).max(0)  # a channel each
    start = torch.zeros(1, CHANNELS, size)
    convolved = mixer.recur(torch.from_numpy(u)[None].float(), {"ssm.2": start}, None)[0][0].numpy()
    assert (np.abs(convolved - expected) / scale).max() < 1e-5
    diagonal, dense = graph_of(mixer.step_form()), graph_of(dense_form(mixer))
    for runner in (diagonal, dense):
        for length in (1, 64):
            assert (np.abs(fed(runner, u, length) - expected) / scale).max() < 1e-4, length


def dense_form(mixer: Any) -> Any:
    """The step form of the same weights with a dense A."""
    table = vars(mixer.config) | {"type": "lti", "export_form": "dense"}
    other = mixers.build(table, HIDDEN, 2, 1e-6, where="model.mixers.m").requires_grad_(False)
    other.load_state_dict(mixer.state_dict())
    return other.step_form()


# ---- what is diagonalised, what is refused


def with_transition(mixer: Any, a: Tensor) -> Any:
    """The mixer with this A `[N, N]` in channel 1; A + A^T must be negative definite."""
    symmetric = -(a + a.mT) / 2 - 1e-4 * torch.eye(len(a))
    mixer.A_skew[1] = a
    mixer.A_root[1] = torch.linalg.cholesky(symmetric.double()).float()
    return mixer


def test_a_jordan_block_is_refused() -> None:
    block = -1.5 * torch.eye(4) + torch.diag(torch.ones(3), 1)
    mixer = with_transition(build(4), block)
    torch.testing.assert_close(mixer.continuous()[1].float(), block, atol=1e-5, rtol=0)
    message = r"layer 2 can't be .* number \S+e\+1\d, allowed is \d+; set export_form = .dense."
    with pytest.raises(EdgelinError, match=message):
        mixer.step_form()
    exported_dense_is_the_mixer(mixer)


def test_legs_is_refused_with_its_condition_number() -> None:
    mixer = mixers.build(
        {"type": "lti", "inner_size": 2, "state_size": 32, "init": "hippo-legs"},
        HIDDEN,
        0,
        1e-6,
        where="m",
    )
    with pytest.raises(EdgelinError, match=r"layer 0 .* number \d\.\de\+\d\d, allowed is"):
        mixer.step_form()
    small = mixers.load("lti").Config(inner_size=1, state_size=3, init="hippo-legs")
    mixer = mixers.load("lti").Mixer(small, HIDDEN, 0, 1e-6)
    assert condition(mixer.continuous()) < MOST_CONDITION
    mixer.step_form()


def exported_dense_is_the_mixer(mixer: Any) -> None:
    """The dense step form and its graph give the mixer's outputs."""
    u = np.random.default_rng(1).standard_normal((200, CHANNELS))
    start = torch.zeros(1, CHANNELS, mixer.config.state_size)
    expected = mixer.double().recur(torch.from_numpy(u)[None], {"ssm.2": start.double()}, None)[0][
        0
    ]
    runner = graph_of(dense_form(mixer.float()))
    for length in (1, 64):
        got = fed(runner, u, length)
        assert np.abs(got - expected.numpy()).max() < 1e-5 * expected.abs().max()


def test_dense_form_takes_legs() -> None:
    exported_dense_is_the_mixer(build(32, init="hippo-legs", export_form="dense"))


def test_states_of_the_step_form() -> None:
    specs = build(7).step_form().state_specs()
    assert [(s.name, s.shape) for s in specs] == [("ssm_re.2", (6, 4)), ("ssm_im.2", (6, 4))]
    assert "one of each conjugate pair" in specs[0].layout
    form = build(7, export_form="dense").step_form()
    assert [(s.name, s.shape) for s in form.state_specs()] == [("ssm.2", (6, 7))]


def test_no_weights_let_a_state_grow() -> None:
    mixer = build()
    for parameter in (mixer.A_skew, mixer.A_root):
        parameter.normal_(std=30)
    assert torch.linalg.eigvals(mixer.continuous()).real.max() < 0
    assert torch.linalg.eigvals(mixer.discrete()[0]).abs().max() < 1


def test_initial_matrices_are_kept() -> None:
    makers = {"s4d-legs": hippo.normal_legs, "hippo-legs": hippo.legs, "hippo-legt": hippo.legt}
    for init, make in makers.items():
        config = mixers.load("lti").Config(inner_size=2, state_size=12, init=init)
        mixer = mixers.load("lti").Mixer(config, HIDDEN, 0, 1e-6)
        a, b = make(12)
        # LegT is singular in its symmetric part, so that ε shows
        torch.testing.assert_close(mixer.continuous()[1], a, atol=2e-4, rtol=1e-6)
        torch.testing.assert_close(mixer.B[0].double(), b, atol=0, rtol=1e-6)


def test_the_transition_does_not_decay_towards_zero() -> None:
    optim = OptimConfig(steps=1, batch_size=1, sequence_length=1, weight_decay=0.5)
    mixer = build()
    kept = optimizer.build(mixer, optim).param_groups[1]["params"]
    names = {id(p): n for n, p in mixer.named_parameters()}
    assert {names[id(p)] for p in kept} == {"A_skew", "A_root", "log_dt", "D"}


def test_training_is_warned_of_a_matrix_that_cannot_be_diagonalised() -> None:
    make = mixers.load("lti").Config
    assert make(inner_size=2).export_obstacle is None
    assert make(inner_size=2, init="hippo-legs", export_form="dense").export_obstacle is None
    obstacle = make(inner_size=2, init="hippo-legs").export_obstacle
    assert "hippo-legs with 16 states can't be exported diagonal" in obstacle
    assert "\n" not in obstacle


@pytest.mark.parametrize(
    "values, message",
    [
        ({"init": "hippo"}, "init is 'hippo'; give one of s4d-legs, hippo-legs, hippo-legt"),
        ({"export_form": "full"}, "export_form is 'full'; give one of diagonal, dense"),
        ({"discretization": "euler"}, "discretization is 'euler'; give one of zoh, bilinear"),
        ({"state_size": 0}, "state_size is 0; give at least 1"),
    ],
)
def test_wrong_tables_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        mixers.load("lti").Config(**({"inner_size": 4} | values))


# ---- export and verify


def checkpoint(folder: Path, table: dict[str, Any]) -> Path:
    """A checkpoint of two layers whose weights move the stream."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        layers=("m", "m"),
        mixers={"m": {"type": "lti", "inner_size": 12, "state_size": 6, **table}},
    )
    model = SequenceModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(3)
    text = tokenizer.train(["a model is one model in all its forms. " * 20], 280)
    checkpoints.save(folder, model, text.to_str())
    return folder


@pytest.mark.parametrize(
    "table",
    [{}, {"export_form": "dense", "init": "hippo-legs", "discretization": "bilinear"}],
    ids=["diagonal", "dense"],
)
def test_export_and_verify(table: dict[str, Any], tmp_path: Path) -> None:
    folder, bundle = checkpoint(tmp_path / "model", table), tmp_path / "bundle"
    for arguments in (
        ["export", folder, "--out", bundle, "--quantize", "none", "--quantize", "int8"],
        ["verify", bundle, "--checkpoint", folder],
    ):
        done = CliRunner().invoke(main, [str(a) for a in arguments])
        assert done.exit_code == 0, done.output
    kinds = {spec.kind for spec in load(bundle).manifest.states}
    assert kinds == ({"ssm"} if table else {"ssm_re", "ssm_im"})


def test_export_names_the_layer_that_it_refuses(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", {"init": "hippo-legs", "state_size": 16})
    with pytest.raises(EdgelinError, match=r"layer 0 .* number \d\.\de\+\d\d, allowed is"):
        export_checkpoint(folder, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
