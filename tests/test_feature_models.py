"""Models of features: pieces, the head for sequences, normalisation, and wrong sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from edgelin.config import ModelConfig, from_dict
from edgelin.errors import EdgelinError
from edgelin.model import SequenceModel

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "layers": ["gdn", "local", "ssm"],
    "mixers": {
        "gdn": {"type": "gated_deltanet", "num_heads": 2, "key_dim": 4, "value_dim": 6},
        "local": {
            "type": "attention", "num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "window": 64
        },
        "ssm": {"type": "ssm", "inner_size": 12, "state_size": 4},
    },
}  # fmt: skip
FEATURES = {"size": 5, "outputs": 3}


def feature_model(head: str) -> SequenceModel:
    """A small model of measurements whose normalisation is not the neutral one."""
    torch.manual_seed(3)
    config = from_dict(ModelConfig, {**SIZES, "features": {**FEATURES, "head": head}})
    model = SequenceModel(config).eval().double()
    model.embedding.mean.uniform_(-1, 1)
    model.embedding.scale.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize("head", ["step", "sequence"])
def test_features_in_pieces_are_features_in_one_call(head: str) -> None:
    model = feature_model(head)
    x = torch.randn(2, 130, 5, dtype=torch.float64)
    whole, last = model(x)
    assert whole.shape == (2, 130, 3)
    pieces, state = [], model.initial_state(2)
    for piece in x.split([1, 63, 65, 1], dim=1):
        y, state = model(piece, state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-9, atol=1e-9)
    for name, tensor in last.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)


def test_a_head_for_sequences_reads_the_mean_over_all_steps() -> None:
    step, sequence = feature_model("step"), feature_model("sequence")
    x = torch.randn(2, 70, 5, dtype=torch.float64)
    streams = step.hidden(x)[0].detach().numpy()
    expected = streams.cumsum(1) / np.arange(1, 71)[:, None]
    weight, bias = (p.detach().numpy() for p in (sequence.head.weight, sequence.head.bias))
    y, state = sequence(x)
    np.testing.assert_allclose(y.detach(), expected @ weight.T + bias, rtol=1e-9)
    np.testing.assert_allclose(state["pool"].detach(), expected[:, -1], rtol=1e-9)
    far = {**state, "position": state["position"] + 10**9}
    nearby = sequence(x[:, :1], far)[1]["pool"]
    np.testing.assert_allclose(nearby.detach(), state["pool"].detach(), rtol=1e-7)


def test_features_are_normalised_inside_the_model() -> None:
    model = feature_model("step")
    x = torch.randn(1, 4, 5, dtype=torch.float64)
    wanted = model.embedding.proj((x - model.embedding.mean) * model.embedding.scale)
    torch.testing.assert_close(model.embedding(x), wanted)


def test_a_broken_sensor_is_far_away_and_no_more() -> None:
    model = feature_model("step").float()
    x = torch.randn(1, 4, 5)
    x[0, 1, 2], x[0, 2, 0], x[0, 3, 4] = 1e30, -3e38, 2e4
    mean, scale = model.embedding.mean.numpy(), model.embedding.scale.numpy()
    z = ((x.numpy().astype(np.float64) - mean) * scale).clip(-10_000, 10_000)
    weight, bias = (p.detach().numpy() for p in model.embedding.proj.parameters())
    np.testing.assert_allclose(model.embedding(x).detach(), z @ weight.T + bias, rtol=1e-4)
    answers = model(x)[0]
    assert answers.isfinite().all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"features": None, "vocab_size": 0}, "model.vocab_size is 0; the least is 1"),
        ({"features": FEATURES, "vocab_size": 7}, "model has both vocab_size and features"),
        ({"features": {**FEATURES, "head": "last"}}, "head is 'last'; allowed: step, sequence"),
        ({"features": {**FEATURES, "task": "sort"}}, "allowed: classification, regression"),
        ({"features": {**FEATURES, "labels": ["a"]}}, "labels has 1 names for 3 outputs"),
        ({"features": {**FEATURES, "labels": ["a", "b", "a"]}}, "needs a name of its own"),
        ({"features": {**FEATURES, "labels": ["a", "b", "c\nd"]}}, "in printable characters"),
        ({"features": {**FEATURES, "labels": ["a", "b", ""]}}, "in printable characters"),
        (
            {"features": {**FEATURES, "labels": ["a", "b", "c"], "task": "regression"}},
            "the task is regression; leave them out",
        ),
        ({"features": {**FEATURES, "size": 0}}, "model.features.size is 0; the least is 1"),
    ],
)
def test_wrong_features_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        from_dict(ModelConfig, {**SIZES, **change})
