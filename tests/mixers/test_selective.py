"""Mamba, Mamba-2, RG-LRU and minGRU: initial values, edges of their gates, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from export_models import random_state, session
from torch.nn import functional as F

from edgelin import mixers
from edgelin.config import ModelConfig, OptimConfig
from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.quantise.nodes import quantise
from edgelin.export.quantise.recipe import RECIPES
from edgelin.export.trace import trace
from edgelin.initial import softplus_inverse
from edgelin.model import SequenceModel
from edgelin.train import optimizer

TABLES: dict[str, dict[str, Any]] = {
    "mamba": {"type": "mamba", "inner_size": 64},
    "mamba2": {"type": "mamba2", "num_heads": 64, "head_dim": 2, "state_size": 3},
    "rg_lru": {"type": "rg_lru", "inner_size": 64, "num_blocks": 4},
    "min_gru": {"type": "min_gru", "inner_size": 64},
}


def model_of(name: str) -> tuple[SequenceModel, Any]:
    """A one-layer model and its mixer."""
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        layers=("m",),
        mixers={"m": TABLES[name]},
    )
    model = SequenceModel(config).eval()
    return model, model.blocks[0].mixer


def check_steps(bias: torch.Tensor) -> None:
    """softplus(bias) is log-uniform in [0.001, 0.1]."""
    steps = F.softplus(bias.detach().double()).log10()
    assert -3.001 <= steps.min() < -2.8 and -1.2 < steps.max() <= -0.999
    assert abs(steps.mean() + 2) < 0.25


def test_mamba_starts_as_its_paper() -> None:
    mixer = model_of("mamba")[1]
    check_steps(mixer.dt_proj.bias)
    np.testing.assert_allclose(mixer.A_log.detach().exp(), [range(1, 17)] * 64, rtol=1e-6)
    assert mixer.dt_proj.weight.shape == (64, 2)  # rank 32 / 16
    assert 0.9 * 2**-0.5 < mixer.dt_proj.weight.abs().max() <= 2**-0.5
    assert (mixer.D == 1).all()


def test_mamba2_starts_as_its_paper() -> None:
    mixer = model_of("mamba2")[1]
    check_steps(mixer.dt_bias)
    rate = mixer.A_log.detach().exp()
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16
    assert (mixer.D == 1).all()


def test_rg_lru_starts_as_its_paper() -> None:
    mixer = model_of("rg_lru")[1]
    decay = (-8 * F.softplus(mixer.Lambda.detach().double())).exp()
    assert 0.8999 <= decay.min() < 0.91 and 0.99 < decay.max() <= 0.9991


def test_softplus_inverse_keeps_small_values() -> None:
    y = torch.tensor([1e-6, 1e-3, 0.1, 3.0, 50.0])
    torch.testing.assert_close(
        F.softplus(softplus_inverse(y.double())), y.double(), rtol=1e-9, atol=0
    )
    torch.testing.assert_close(F.softplus(softplus_inverse(y)), y, rtol=3e-6, atol=0)


@pytest.mark.parametrize("bias", [-200.0, -60.0, -12.0, 12.0])
def test_rg_lru_keeps_its_digits_where_nothing_decays(bias: float) -> None:
    """A recurrence gate near 0 makes a near 1: a factor without cancellation, finite gradients."""
    mixer = model_of("rg_lru")[1]
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2))
    state = {s.name: torch.zeros(1, *s.shape) for s in mixer.state_specs()}
    with torch.no_grad():
        mixer.decay_bias[:64] = bias
    _, after = mixer(x, state, torch.tensor([0]))
    after["ssm.0"].square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    exact = mixer.double()
    _, wanted = exact(x.double(), {k: v.double() for k, v in state.items()}, torch.tensor([0]))
    expected = wanted["ssm.0"].detach()
    # below float32's smallest gate the factor is the floor's root, 1e-15, instead of nothing
    atol = 1e-14 if bias < -100 else float(2e-6 * expected.abs().max())
    np.testing.assert_allclose(after["ssm.0"].detach(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "name, kept", [("mamba", {"A_log"}), ("mamba2", set()), ("rg_lru", set()), ("min_gru", set())]
)
def test_eigenvalues_do_not_decay(name: str, kept: set[str]) -> None:
    mixer = model_of(name)[1]
    groups = optimizer.build(mixer, OptimConfig(steps=1, batch_size=1, sequence_length=1))
    names = {id(p): n for n, p in mixer.named_parameters()}
    still = {names[id(p)] for p in groups.param_groups[1]["params"]}
    vectors = {n for n, p in mixer.named_parameters() if p.ndim == 1}
    assert still == vectors | kept


@pytest.mark.parametrize("name", TABLES)
def test_exported_graphs(name: str) -> None:
    """Gates stay float; a graph of standard operators alone is the model too."""
    model = model_of(name)[0]
    traced = trace(model)
    graph = traced.clone()
    passes.lower(graph, PROFILES["fused"])
    recipe = RECIPES["int8"]
    assert recipe is not None
    rounded = {n for n in quantise(graph, recipe).matrices if ".mixer." in n}
    into = "in_proj" if name.startswith("mamba") else "in_gate_proj"
    assert rounded == {f"blocks.0.mixer.{p}.weight" for p in (into, "out_proj")}

    passes.lower(traced, PROFILES["onnx"])
    passes.finish(traced, PROFILES["onnx"])
    ids, state = torch.arange(14).reshape(2, 7), random_state(model, 2)
    feeds = {s.input_name: state[s.name] for s in model.state_specs()}
    feeds |= {"input_ids": ids.numpy(), "num_logits_to_keep": np.array(0)}
    logits = session(traced).run(["logits"], feeds)[0]
    with torch.no_grad():
        wanted = model(ids, {k: torch.from_numpy(v) for k, v in state.items()})[0]
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=float(2e-5 * wanted.abs().max()))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("mamba", {"dt_rank": 0}, "dt_rank is 0; give at least 1"),
        ("mamba", {"conv_size": 1}, "conv_size is 1; give at least 2"),
        ("mamba", {"state_size": 0}, "state_size is 0; give at least 1"),
        ("mamba2", {"num_groups": 5}, "num_heads is 64, no multiple of num_groups = 5"),
        ("mamba2", {"conv_size": 1}, "conv_size is 1; give at least 2"),
        ("rg_lru", {"num_blocks": 5}, "inner_size is 64, no multiple of num_blocks = 5"),
        ("min_gru", {"inner_size": 0}, "inner_size is 0; give at least 1"),
    ],
)
def test_wrong_sizes_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        mixers.build({**TABLES[name], **change}, 32, 0, 1e-6, where="model.mixers.m")
