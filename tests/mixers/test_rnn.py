"""Initial weights of the rnn mixer, and what its tables may not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgelin import mixers
from edgelin.errors import EdgelinError


def build(**changes: Any) -> Any:
    """A mixer of 64 channels."""
    torch.manual_seed(0)
    table = {"type": "rnn", "inner_size": 64, **changes}
    return mixers.build(table, 8, 0, 1e-6, where="model.mixers.m")


def test_elementwise_weights_start_in_the_ring() -> None:
    mixer = build()
    a = torch.exp(-torch.exp(mixer.nu.detach().double()))
    assert 0.9 <= a.min() < 0.93 and 0.98 < a.max() <= 0.999
    u = torch.randn(1, 4000, 64)
    z, _ = mixer._elementwise(u, torch.zeros(1, 64), None)
    assert z.abs().max() <= 1
    z, _ = build(activation="identity")._elementwise(u, torch.zeros(1, 64), None)
    assert 0.8 < z.detach()[:, 1000:].std() < 1.2  # gamma keeps the variance of u


@pytest.mark.parametrize("activation", ["identity", "tanh", "relu", "sigmoid"])
def test_full_weights_start_orthogonal(activation: str) -> None:
    w = build(recurrence="full", activation=activation).recurrent_weight.detach()
    torch.testing.assert_close(w @ w.T, 0.95**2 * torch.eye(64), rtol=0, atol=1e-5)
    assert bool(torch.equal(w, 0.95 * torch.eye(64))) == (activation == "relu")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"recurrence": "diagonal"}, "recurrence is 'diagonal'; allowed: elementwise, full"),
        ({"activation": "gelu"}, "activation is 'gelu'; allowed: identity, tanh, relu, sigmoid"),
        ({"inner_size": 0}, "inner_size is 0; give at least 1"),
    ],
)
def test_wrong_tables_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        build(**changes)
