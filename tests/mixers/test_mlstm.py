"""What is special to mLSTM: gates at their ends, initial values, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from export_models import session
from loops import mlstm
from loops.common import EPS, HIDDEN, LAYER, LINEAR

from edgelin import mixers
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.trace import trace
from edgelin.model import SequenceModel


def build(**changes: Any) -> Any:
    """A mixer of the loops' sizes."""
    torch.manual_seed(3)
    table = {"type": "mlstm", **LINEAR, **changes}
    return mixers.build(table, HIDDEN, LAYER, EPS, where="model.mixers.m")


@pytest.mark.parametrize("cap", [15.0, 60.0])
@pytest.mark.parametrize("write, forget", [(99, 99), (99, -99), (-99, 99), (-99, -99)])
def test_gates_at_their_ends_are_the_loop(cap: float, write: float, forget: float) -> None:
    """Values and gradients stay finite; where m is large, epsilon is not small."""
    mixer = build(gate_softcap=cap)
    bias = mixer.beta_decay_proj.bias.data
    bias[:2], bias[2:] = write, forget
    bias[0] = bias[2] = 0.5  # the other head is an ordinary one
    x = torch.randn(2, 130, HIDDEN, generator=torch.Generator().manual_seed(1))
    shapes = {s.name: (2, *s.sized()) for s in mixer.state_specs()}
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    arrays = {name: tensor.double().numpy() for name, tensor in state.items()}
    wanted, after = mlstm.loop(mixer, x.double().numpy(), arrays, None)
    y, found = mixer(x, state, torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(y, torch.from_numpy(wanted).float(), rtol=0, atol=1e-4)
    for name, tensor in found.items():
        scale = max(1.0, abs(after[name]).max())
        assert (tensor - torch.from_numpy(after[name])).abs().max() < 1e-5 * scale, name
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize("profile", list(PROFILES))
def test_graphs_refuse_more_than_a_chunk(profile: str) -> None:
    """The running maximum is one chunk's in every profile, whatever length the rest would take."""
    config = ModelConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=0,
        layers=("m",),
        mixers={"m": {"type": "mlstm", **LINEAR}},
    )
    model = SequenceModel(config).eval().requires_grad_(False)
    graph = trace(model)
    passes.lower(graph, PROFILES[profile])
    passes.finish(graph, PROFILES[profile])
    runner, state = session(graph), model.initial_state(1)
    feeds: dict[str, Any] = {s.input_name: state[s.name].numpy() for s in model.state_specs()}
    runner.run(None, {**feeds, "input_ids": np.zeros((1, 64), np.int64)})
    with pytest.raises(Exception, match="out of data bounds"):
        runner.run(None, {**feeds, "input_ids": np.zeros((1, 65), np.int64)})


def test_at_first_heads_write_little_and_forget_slowly() -> None:
    mixer = build()
    mixer.reset_parameters()
    x = torch.randn(1, 4, HIDDEN)
    gates = mixer.beta_decay_proj(x)
    torch.testing.assert_close(gates, torch.tensor([-10.0, -10.0, 3.0, 6.0]).expand(1, 4, 4))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gate_softcap": 0.0}, "gate_softcap is 0.0; it must be above 0 and at most 60"),
        ({"gate_softcap": 61.0}, "gate_softcap is 61.0; it must be above 0 and at most 60"),
        ({"eps": 0.0}, "eps is 0.0; it must be above 0"),
        ({"norm_eps": 2.0}, "norm_eps is 2.0; it must be above 0"),
        ({"num_heads": 0}, "num_heads is 0; give at least 1"),
    ],
)
def test_wrong_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        build(**change)
