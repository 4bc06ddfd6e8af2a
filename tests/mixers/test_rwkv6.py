"""What is special to RWKV-6: its initial values and the end of its decays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgelin.config import ModelConfig
from edgelin.model import SequenceModel

TABLE = {"type": "rwkv6", "num_heads": 2, "key_dim": 3, "value_dim": 4}


def built(layers: int, **sizes: int) -> list[Any]:
    """The mixers of a model of width 8, with the initial weights that training starts from."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        layers=("m",) * layers,
        mixers={"m": {**TABLE, **sizes}},
    )
    return [block.mixer for block in SequenceModel(config).blocks]


def test_initial_values_are_the_published_ones() -> None:
    """Layer 4 stands half way up (r = 0.5) in what RWKV-LM counts from 0 to 1."""
    mixer = built(5)[4]
    share = [(i / 8) ** 0.5 for i in range(8)]
    half = [(i / 8) ** 0.25 for i in range(8)]
    want = [[1 - s for s in share]] * 2 + [[1 - s - 0.15 for s in share]]
    want += [[1 - s for s in half]] * 2
    torch.testing.assert_close(mixer.mix_bias.detach(), torch.tensor(want))
    torch.testing.assert_close(mixer.mix_base.detach(), torch.tensor(want[0]))
    speeds = [-6 + 5 * (n / 5) ** 1.35 for n in range(6)]
    torch.testing.assert_close(mixer.decay_out_proj.bias.detach(), torch.tensor(speeds))
    own = [0.5 * (1 - n / 5) + ((n + 1) % 3 - 1) * 0.1 for n in range(6)]
    torch.testing.assert_close(mixer.bonus.detach().flatten(), torch.tensor(own))
    for weight in (mixer.mix_out, mixer.decay_out_proj.weight):
        assert 0.005 < weight.abs().max() <= 0.01
    for weight in (mixer.mix_in_proj.weight, mixer.decay_in_proj.weight):
        assert (weight == 0).all()


def test_one_channel_has_an_initial_decay() -> None:
    mixer = built(1, num_heads=1, key_dim=1)[0]
    assert mixer.decay_out_proj.bias.tolist() == [-6.0] and mixer.bonus.isfinite().all()


@pytest.mark.parametrize("d", [-20.0, 200.0])
def test_any_decay_has_a_finite_gradient(d: float) -> None:
    """exp(d) may overflow: the decay is then the floor, and does not depend on d any more."""
    mixer = built(1)[0]
    torch.nn.init.constant_(mixer.decay_out_proj.bias, d)
    state = {s.name: torch.ones(1, *s.shape) for s in mixer.state_specs()}
    y, after = mixer(torch.randn(1, 3, 8), state, torch.tensor([0]))
    (y.sum() + after["recurrent.0"].sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in mixer.parameters())
    assert (mixer.decay_out_proj.bias.grad == 0).all() == (d > 0)
