"""Linear attention that is not causal, and what its tables may not say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from loops.common import EPS, HIDDEN, LINEAR, heads_of, matrix
from loops.linear_attention import MAPS, added_to_sum
from torch import Tensor

from edgelin import mixers
from edgelin.errors import EdgelinError

TABLE: dict[str, Any] = {"type": "linear_attention", **LINEAR}
ENCODERS = [
    {"feature_map": "elu"},
    {"feature_map": "favor"},
    {"feature_map": "taylor", "normalize": "rms"},
    {"feature_map": "identity", "normalize": "rms"},
]


def build(**changes: Any) -> Any:
    """A mixer with reproducible weights."""
    torch.manual_seed(7)
    return mixers.build({**TABLE, **changes}, HIDDEN, 3, EPS, where="model.mixers.m")


def stream(batch: int, time: int) -> Tensor:
    """Inputs in float64."""
    generator = torch.Generator().manual_seed(time)
    return torch.randn(batch, time, HIDDEN, generator=generator, dtype=torch.float64)


def whole(m: Any, x: np.ndarray) -> np.ndarray:
    """Every token against every other, by the matrix of weights."""
    c = m.config
    q, k, v = np.split(
        x @ matrix(m, "qkv_proj.weight").T, np.cumsum([c.num_heads * c.key_dim] * 2), axis=-1
    )
    q, k, v = (heads_of(a, c.num_heads) for a in (q, k, v))
    q, k = MAPS[c.feature_map](m, q, k)
    weights = np.einsum("bihf,bjhf->bhij", q, k)
    if c.normalize == "z":
        weights = weights / (weights.sum(-1, keepdims=True) + added_to_sum(m))
    o = np.einsum("bhij,bjhv->bihv", weights, v)
    if c.normalize == "rms":
        o = o / np.sqrt((o**2).mean(-1, keepdims=True) + EPS) * matrix(m, "norm.weight")
    return o.reshape(*x.shape[:2], -1) @ matrix(m, "out_proj.weight").T


@pytest.mark.parametrize("changes", ENCODERS, ids=str)
@pytest.mark.parametrize("batch, time", [(3, 1), (1, 65), (3, 130)])
def test_encoder_sees_the_whole_call(changes: dict[str, Any], batch: int, time: int) -> None:
    mixer, x = build(causal=False, **changes), stream(batch, time)
    expected = whole(mixer, x.numpy())
    assert mixer.state_specs() == []
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        y, state = mixer.to(dtype)(x.to(dtype), {}, torch.zeros(batch, dtype=torch.int64))
        assert state == {}
        scale = np.abs(expected).max()
        np.testing.assert_allclose(y.detach(), expected, rtol=0, atol=tolerance * scale)


def test_encoder_trains_every_parameter() -> None:
    mixer = build(causal=False, feature_map="hedgehog")
    mixer(stream(2, 9).float(), {}, torch.zeros(2, dtype=torch.int64))[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in mixer.parameters())


def test_encoder_is_not_exported() -> None:
    mixer = build(causal=False)
    assert "causal = false can't be exported" in mixer.config.export_obstacle
    assert build().config.export_obstacle is None
    with pytest.raises(EdgelinError, match=r"needs the whole sequence .* set causal to true"):
        torch.export.export(mixer, (stream(1, 3).float(), {}, torch.tensor([0])))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"feature_map": "cosine"}, "feature_map is 'cosine'; allowed: elu, identity, relu"),
        ({"feature_map": "identity"}, "'identity' has features of both signs.*'rms'"),
        ({"normalize": "layer"}, "normalize is 'layer'; allowed: z, rms"),
        ({"num_features": 8}, "num_features is 8, but feature_map 'elu' has .* take 'favor'"),
        ({"num_features": 0, "feature_map": "favor"}, "num_features is 0; give at least 1"),
        ({"type": "ema_attention", "decay": 1.0}, "decay is 1.0; give a number above 0 and below"),
        ({"type": "ema_attention", "causal": False}, "unknown key 'causal'"),
    ],
)
def test_wrong_tables_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        build(**changes)


def test_moving_averages_start_over_2_to_256_tokens() -> None:
    mixer = build(type="ema_attention", num_heads=8)
    tokens = 1 / (1 - torch.sigmoid(mixer.decay_logit.detach().double()))
    torch.testing.assert_close(tokens, 2.0 ** torch.arange(1, 9).double(), rtol=1e-4, atol=0)
