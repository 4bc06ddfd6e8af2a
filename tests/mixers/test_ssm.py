"""Diagonal state-space mixer against a float64 numpy loop over tokens with complex numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from edgelin import mixers
from edgelin.config import OptimConfig
from edgelin.errors import EdgelinError
from edgelin.mixers.ssm import frequencies
from edgelin.recurrences.lti.hippo import normal_legs
from edgelin.train import optimizer

HIDDEN, INNER, SIZE = 10, 12, 4
KINDS = {
    "complex": {},
    "real": {"complex": False},
    "bilinear": {"discretization": "bilinear", "init": "s4d-inv"},
}


def build(kind: str) -> Any:
    """A mixer whose parameters are off their initial values."""
    torch.manual_seed(5)
    table = {"type": "ssm", "inner_size": INNER, "state_size": SIZE, **KINDS[kind]}
    mixer = mixers.build(table, HIDDEN, 2, 1e-6, where="model.mixers.m")
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return mixer


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal float64 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled_state(mixer: Any, batch: int) -> dict[str, Tensor]:
    """A state that is not zero."""
    return {s.name: numbers(batch, *s.shape, seed=i) for i, s in enumerate(mixer.state_specs())}


def single(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state in float32."""
    return {name: tensor.float() for name, tensor in state.items()}


def loop(mixer: Any, x: np.ndarray, state: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """y and the last h: discretise, then one token after the other."""
    w = {n: p.detach().double().numpy() for n, p in mixer.named_parameters()}
    a = -np.exp(w["A_real_log"])
    c, h = w["C"], state[next(iter(state))].numpy()
    if mixer.config.complex:
        a = a + 1j * w["A_imag"]
        c = 2 * (c[..., 0] + 1j * c[..., 1])
        h = h + 1j * state["ssm_im.2"].numpy()
    dt = np.exp(w["log_dt"])[:, None]
    transition, b = np.exp(dt * a), (np.exp(dt * a) - 1) / a
    if mixer.config.discretization == "bilinear":
        transition, b = (2 + dt * a) / (2 - dt * a), 2 * dt / (2 - dt * a)
    outputs = []
    for t in range(x.shape[1]):
        u, gate = np.split(x[:, t] @ w["in_gate_proj.weight"].T, 2, axis=-1)
        h = transition * h + b * u[..., None]
        y = (c * h).sum(-1).real + w["D"] * u
        outputs.append((y * gate / (1 + np.exp(-gate))) @ w["out_proj.weight"].T)
    return np.stack(outputs, axis=1), h


def call(mixer: Any, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The mixer, without gradients."""
    with torch.no_grad():
        result: tuple[Tensor, dict[str, Tensor]] = mixer(
            x, state, torch.zeros(len(x), dtype=torch.int64)
        )
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch, time", [(1, 1), (3, 63), (1, 64), (3, 65), (1, 130)])
def test_mixer_is_the_equation(batch: int, time: int, kind: str) -> None:
    mixer = build(kind)
    x, state = numbers(batch, time, HIDDEN), filled_state(mixer, batch)
    expected, h = loop(mixer, x.numpy(), state)
    y, after = call(mixer.double(), x, state)
    np.testing.assert_allclose(y, expected, atol=1e-9)
    np.testing.assert_allclose(after[mixer.state_specs()[0].name], h.real, atol=1e-9)
    if mixer.config.complex:
        np.testing.assert_allclose(after["ssm_im.2"], h.imag, atol=1e-9)
    y, after = call(mixer.float(), x.float(), single(state))
    np.testing.assert_allclose(y, expected, atol=3e-5)
    assert all(v.dtype == torch.float32 for v in after.values())


@pytest.mark.parametrize("kind", KINDS)
def test_parallel_call_is_the_steps_and_two_halves(kind: str) -> None:
    mixer = build(kind).double()
    x, state = numbers(2, 70, HIDDEN), filled_state(mixer, 2)
    whole, after = call(mixer, x, state)
    for cuts in (range(71), (0, 41, 70)):
        outputs, carried = [], state
        for a, z in itertools.pairwise(cuts):
            y, carried = call(mixer, x[:, a:z], carried)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole, atol=1e-10, rtol=0)
        assert carried.keys() == after.keys()
        for name in after:
            torch.testing.assert_close(carried[name], after[name], atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_change_nothing_before_them(kind: str) -> None:
    mixer = build(kind).double()
    x, state = numbers(1, 70, HIDDEN), filled_state(mixer, 1)
    changed = x.clone()
    changed[:, 66:] += 1
    y, other = (call(mixer, v, state)[0] for v in (x, changed))
    torch.testing.assert_close(y[:, :66], other[:, :66], atol=1e-12, rtol=0)
    assert (y[:, 66] - other[:, 66]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    mixer = build(kind)
    state = single(filled_state(mixer, 2))
    y, after = mixer(numbers(2, 66, HIDDEN).float(), state, torch.zeros(2, dtype=torch.int64))
    (y.square().sum() + sum(v.sum() for v in after.values())).backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        assert torch.isfinite(parameter.grad).all(), name


def test_eigenvalues_do_not_decay() -> None:
    mixer = build("complex")
    optim = OptimConfig(steps=1, batch_size=1, sequence_length=1, weight_decay=0.5)
    decayed, kept = optimizer.build(mixer, optim).param_groups
    names = {id(p): n for n, p in mixer.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        "in_gate_proj.weight",
        "out_proj.weight",
        "C",
    }
    assert {names[id(p)] for p in kept["params"]} == {"log_dt", "A_real_log", "A_imag", "D"}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)


def test_initial_values_are_those_of_s4d_lin() -> None:
    config = mixers.load("ssm").Config(inner_size=2000, state_size=3, dt_min=1e-3, dt_max=1e-1)
    mixer = mixers.load("ssm").Mixer(config, HIDDEN, 0, 1e-6)
    np.testing.assert_allclose(-mixer.A_real_log.detach().exp(), -0.5, rtol=1e-6)
    np.testing.assert_allclose(mixer.A_imag[5].detach(), [0, math.pi, 2 * math.pi], rtol=1e-6)
    dt = mixer.log_dt.detach().exp()
    assert 1e-3 <= dt.min() < 1.2e-3 and 0.083 < dt.max() <= 0.1001
    assert abs(dt.log().mean() - math.log(1e-2)) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_small_steps_keep_their_digits(kind: str) -> None:
    mixer = build(kind)
    with torch.no_grad():
        mixer.log_dt.fill_(-14)
    b = mixer.transition()[0].detach()
    a = -mixer.A_real_log.detach().double().exp()
    if mixer.config.complex:
        a = a + 1j * mixer.A_imag.detach().double()
        b = torch.view_as_complex(b)
    dt = torch.tensor(-14.0).exp().double()  # the step as float32 has it
    expected = torch.expm1(dt * a) / a if kind == "real" else dt * (1 + dt * a / 2)
    assert ((b - expected).abs() / expected.abs()).max() < 1e-6


@pytest.mark.parametrize("log_dt", [-14.0, -5.0, 0.0, math.log(4 / 3), 3.0])
def test_bilinear_transition_keeps_its_digits(log_dt: float) -> None:
    """From small steps to those at which Λ passes zero (Δ = 2 / 1.5) and turns its sign."""
    mixer = build("bilinear")
    with torch.no_grad():
        mixer.log_dt.fill_(log_dt)
        mixer.A_real_log.fill_(math.log(1.5))
        mixer.A_imag[:, 0] = 0
    b, _, g, theta = (v.detach() for v in mixer.transition())
    dt = torch.tensor(log_dt).exp().double()
    rate = torch.tensor(math.log(1.5)).exp().double()
    a = torch.complex(-rate.expand(INNER, SIZE), mixer.A_imag.detach().double())
    expected = (2 + dt * a) / (2 - dt * a)
    got = torch.polar(g.double().exp(), theta.double())
    assert (got - expected).abs().max() < 3e-7
    decay = expected.abs().log()
    far = expected.abs() > 1e-3
    assert ((g - decay) / decay)[far].abs().max() < 3e-6
    wanted = 2 * dt / (2 - dt * a)
    assert ((torch.view_as_complex(b) - wanted) / wanted).abs().max() < 1e-6


def test_bilinear_gradients_are_finite_where_the_transition_is_zero() -> None:
    mixer = build("bilinear")
    with torch.no_grad():
        mixer.log_dt.fill_(0.0)
        mixer.A_real_log.fill_(math.log(2.0))
        mixer.A_imag.zero_()
    sum(v.sum() for v in mixer.transition()).backward()
    for name in ("log_dt", "A_real_log", "A_imag"):
        assert mixer.get_parameter(name).grad.isfinite().all(), name


def test_initial_frequencies_are_those_of_s4d() -> None:
    """S4D-Inv approximates S4D-Legs, whose eigenvalues lie on a line."""
    legs, inverse = (frequencies(init, 32).double() for init in ("s4d-legs", "s4d-inv"))
    assert (legs.diff() < 0).all() and legs[-1] > 0
    assert ((inverse - legs) / legs)[:3].abs().max() < 0.08
    np.testing.assert_allclose(inverse[0], 64 * 63 / math.pi, rtol=1e-6)
    a = normal_legs(64)[0]
    for frequency in legs[[0, 10, 31]]:
        value = torch.complex(torch.tensor(-0.5, dtype=torch.float64), frequency)
        distance = torch.linalg.svdvals(a - value * torch.eye(64))[-1]
        assert distance < 1e-4 * max(1, frequency)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"inner_size": 0}, "inner_size is 0; give at least 1"),
        ({"inner_size": 4, "dt_min": 0.2}, "give 0 < dt_min <= dt_max"),
        ({"init": "s4d-real"}, "complex = true give s4d-lin or s4d-inv or s4d-legs"),
        ({"init": "s4d-lin", "complex": False}, "init is 's4d-lin'; .* false give s4d-real"),
        ({"discretization": "tustin"}, "discretization is 'tustin'; give one of zoh, bilinear"),
        ({"discretization": "bilinear", "complex": False}, r"give .zoh., or complex = true"),
    ],
)
def test_impossible_sizes_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        mixers.load("ssm").Config(**({"inner_size": 4} | values))
