"""RWKV-4 beside the sums that define it, and with keys whose exponentials overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from loops import CASES, rwkv4
from loops.common import EPS, HIDDEN, LAYER, linear, matrix, sigmoid
from torch import Tensor

from edgelin import mixers


def build() -> Any:
    """A mixer with reproducible weights."""
    torch.manual_seed(7)
    return mixers.build(CASES["rwkv4"], HIDDEN, LAYER, EPS, where="model.mixers.m")


def start(mixer: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The states before the first of 3 tokens."""
    return {
        spec.name: torch.full((3, *spec.sized()), spec.initial, dtype=dtype)
        for spec in mixer.state_specs()
    }


@torch.no_grad()
def test_outputs_are_weighted_means() -> None:
    """Equation 16 of the paper as it stands, without a maximum and without a state."""
    mixer = build().double()
    x = torch.randn(3, 20, HIDDEN, generator=torch.Generator().manual_seed(1)).double()
    late = np.concatenate([np.zeros((3, 1, HIDDEN)), x.numpy()[:, :-1]], axis=1)
    shares = matrix(mixer, "mix")
    xk, xv, xr = (share * late + (1 - share) * x.numpy() for share in shares)
    k, v, r = (linear(mixer, f"{n}_proj", y) for n, y in (("k", xk), ("v", xv), ("r", xr)))
    speed, wanted = np.exp(matrix(mixer, "decay")), np.zeros_like(v)
    for t in range(20):
        ages = t - 1 - np.arange(t + 1)[:, None]
        exponents = k[:, : t + 1] - ages * speed
        exponents[:, t] = matrix(mixer, "bonus") + k[:, t]
        weights = np.exp(exponents)
        wanted[:, t] = (weights * v[:, : t + 1]).sum(1) / weights.sum(1)
    wanted = linear(mixer, "out_proj", sigmoid(r) * wanted)
    y, _ = mixer(x, start(mixer, torch.float64), torch.zeros(3, dtype=torch.int64))
    np.testing.assert_allclose(y.numpy(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", [[130], [1] * 130, [63, 1, 66]], ids=["one", "steps", "pieces"])
@torch.no_grad()
def test_keys_of_hundreds(cuts: list[int]) -> None:
    mixer = build()
    mixer.k_proj.weight *= 300
    x = torch.randn(3, 130, HIDDEN, generator=torch.Generator().manual_seed(2))
    arrays = {name: t.numpy() for name, t in start(mixer, torch.float64).items()}
    wanted, states = rwkv4.loop(mixer, x.double().numpy(), arrays, np.zeros(3))
    assert np.abs(states["max.3"]).max() > 100
    state, outputs = start(mixer, torch.float32), []
    for piece in x.split(cuts, dim=1):
        y, state = mixer(piece, state, torch.zeros(3, dtype=torch.int64))
        outputs.append(y)
    np.testing.assert_allclose(torch.cat(outputs, 1).numpy(), wanted, rtol=0, atol=1e-3)
    for name, array in states.items():
        error = np.abs(state[name].numpy() - array).max()
        assert error < 1e-3 * max(1, np.abs(array).max()), name
