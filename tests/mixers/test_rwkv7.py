"""What RWKV-7 layers share, and their published initial values."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from export_models import session
from loops import rwkv7 as truth
from torch import Tensor

from edgelin import mixers
from edgelin.config import ModelConfig
from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.trace import trace
from edgelin.model import SequenceModel

TABLE = truth.CASES["rwkv7"]
NARROW = {**TABLE, "value_dim": 4}
GLA = {"type": "gla", "num_heads": 2, "key_dim": 6, "value_dim": 10}


def model(*layers: dict[str, Any]) -> SequenceModel:
    """A model of these mixers, its gates no longer zero."""
    torch.manual_seed(5)
    config = ModelConfig(
        vocab_size=50,
        hidden_size=20,
        intermediate_size=8,
        layers=tuple(f"m{i}" for i in range(len(layers))),
        mixers={f"m{i}": table for i, table in enumerate(layers)},
    )
    made = SequenceModel(config).eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        if name.endswith("_in_proj.weight"):
            parameter.normal_(std=0.3)
    made.embedding.weight.normal_(std=1.0)
    return made


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_later_layer_takes_values_of_the_first() -> None:
    first, later = (mixers.build(TABLE, 20, 3, 1e-6, where="m").double() for _ in range(2))
    later.follow([first])
    later.double().requires_grad_(False)
    for i, parameter in enumerate(later.parameters()):  # many start equal or symmetric
        parameter.add_(0.2 * numbers(*parameter.shape, seed=20 + i))
    assert later.follows and not first.follows
    x, state = numbers(2, 70, 20), {"shift.3": numbers(2, 20), "recurrent.3": numbers(2, 2, 6, 10)}
    values = numbers(2, 70, 20, seed=1)
    shared = {"v_first.20": values}
    y, after = later(x, state, torch.tensor([0, 0]), shared)
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    wanted, states = truth.loop(later, x.numpy(), arrays, np.zeros(2), values.numpy())
    alone, _ = truth.loop(later, x.numpy(), arrays, np.zeros(2))
    np.testing.assert_allclose(y.detach(), wanted, atol=1e-10)
    assert np.abs(alone - wanted).max() > 1e-3
    for name, array in states.items():
        np.testing.assert_allclose(after[name].detach(), array, atol=1e-10)
    assert shared == {"v_first.20": values}


def test_the_first_layer_leaves_its_values_before_any_mixing() -> None:
    first = mixers.build(TABLE, 20, 3, 1e-6, where="m")
    x, last = numbers(1, 5, 20).float(), torch.zeros(1, 20)
    shared: dict[str, Tensor] = {}
    state = {"shift.3": last, "recurrent.3": torch.zeros(1, 2, 6, 10)}
    first(x, state, torch.tensor([0]), shared)
    late = torch.cat([last[:, None], x[:, :-1]], dim=1)
    expected = (x + (late - x) * first.mix[3]) @ first.v_proj.weight.T
    torch.testing.assert_close(shared, {"v_first.20": expected})


@pytest.mark.parametrize(
    "layers, follows",
    [
        ([TABLE, TABLE, TABLE], [False, True, True]),
        ([GLA, TABLE, GLA, TABLE], [None, False, None, True]),
        ([TABLE, NARROW, TABLE, NARROW], [False, False, True, True]),
    ],
)
def test_which_layers_follow(layers: list[dict[str, Any]], follows: list[bool | None]) -> None:
    made = model(*layers)
    assert [getattr(b.mixer, "follows", None) for b in made.blocks] == follows
    made.requires_grad_(True)
    logits, _ = made(torch.arange(10).view(2, 5))
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in made.parameters())


@pytest.mark.parametrize("profile", ["fused", "plain"])
def test_exported_graphs_share_the_values(profile: str) -> None:
    made = model(TABLE, GLA, TABLE, TABLE)
    specs = made.state_specs()
    ids = torch.randint(0, 50, (2, 73), generator=torch.Generator().manual_seed(4))
    state = {s.name: 0.3 * numbers(2, *s.shape, seed=i) for i, s in enumerate(specs)}
    wanted, states = copy.deepcopy(made).double()(ids, state)
    graph = trace(made)
    passes.lower(graph, PROFILES[profile])
    passes.finish(graph, PROFILES[profile])
    runner, start, logits = session(graph), 0, []
    now = {s.name: state[s.name].numpy().astype(s.dtype) for s in specs}
    for length in (1, 64, 8):
        feeds = {s.input_name: now[s.name] for s in specs}
        feeds["input_ids"] = ids[:, start : start + length].numpy()
        piece, *after = runner.run(None, {**feeds, "num_logits_to_keep": np.array(0)})
        logits.append(piece)
        now = {spec.name: array for spec, array in zip(specs, after, strict=True)}
        start += length
    np.testing.assert_allclose(np.concatenate(logits, 1), wanted, atol=1e-4)
    for name, tensor in states.items():
        np.testing.assert_allclose(now[name], tensor, atol=1e-4)


def test_initial_values_are_those_of_the_published_code() -> None:
    layer = mixers.build({**TABLE, "key_dim": 8}, 20, 0, 1e-6, where="m")
    layer.reset_parameters()
    n = np.arange(16)
    zigzag = ((n % 8) - 3.5) / 3.5
    zigzag = zigzag * np.abs(zigzag)
    linear = n / 15 - 0.5
    speeds = -6 + 6 * (n / 15) ** 1.0 + 0.5 + 2.5 * zigzag
    channel = np.arange(20) / 20
    expected = {
        "decay_out_proj.bias": speeds,
        "beta_out_proj.bias": -0.19 + 0.3 * zigzag + 0.4 * linear,
        "k_k": 0.71 - 0.1 * linear,
        "mix": 1 - channel ** np.array([[0.2], [0.9], [0.7], [0.7], [0.9], [0.2]]),
    }
    for name, array in expected.items():
        np.testing.assert_allclose(layer.get_parameter(name).detach(), array, atol=1e-6)
    outer = layer.decay_out_proj.weight.detach()
    torch.testing.assert_close(outer.T @ outer, 0.01 * torch.eye(4), atol=1e-6, rtol=0)
    assert not layer.decay_in_proj.weight.any()
