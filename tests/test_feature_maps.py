"""Feature maps: what phi(q) . phi(k) stands for, and what is kept of the random ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from edgelin import checkpoint, feature_maps, mixers
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.feature_maps import Favor, FeatureMap
from edgelin.model import SequenceModel

HEADS, WIDTH = 2, 6


def make(name: str, num_features: int | None = None) -> FeatureMap:
    """A map with reproducible weights."""
    torch.manual_seed(3)
    return feature_maps.build(name, num_heads=HEADS, width=WIDTH, num_features=num_features)


def numbers(time: int = 5, scale: float = 1.0) -> Tensor:
    """Queries and keys `[2, T, 2 H, K]`, float64."""
    generator = torch.Generator().manual_seed(time)
    return scale * torch.randn(2, time, 2 * HEADS, WIDTH, generator=generator, dtype=torch.float64)


def similarities(features: FeatureMap, qk: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """phi(q_i) . phi(k_j) and q_i . k_j / sqrt(K), `[2, H, T, T]`."""
    q, k = (x.detach().numpy() for x in features.double()(qk))
    raw_q, raw_k = qk.numpy()[:, :, :HEADS], qk.numpy()[:, :, HEADS:]
    products = [np.einsum("bihk,bjhk->bhij", a, b) for a, b in ((q, k), (raw_q, raw_k))]
    return products[0], products[1] / WIDTH**0.5


@pytest.mark.parametrize("name", feature_maps.NAMES)
def test_sizes_dtypes_and_signs(name: str) -> None:
    features = make(name)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for x in features.to(torch.promote_types(dtype, torch.float32))(numbers().to(dtype)):
            assert x.shape == (2, 5, HEADS, features.size) and x.dtype == dtype
    similarity, _ = similarities(features, numbers(scale=3.0))
    assert features.signed == bool((similarity < 0).any())


def test_taylor_is_the_series() -> None:
    similarity, x = similarities(make("taylor"), numbers())
    np.testing.assert_allclose(similarity, 1 + x + x**2 / 2, rtol=1e-12)
    assert make("taylor").size == 1 + WIDTH + WIDTH * (WIDTH + 1) // 2


def test_favor_estimates_softmax_attention() -> None:
    features, qk = make("favor", 6 * WIDTH), numbers(scale=0.5)
    total = np.zeros((2, HEADS, 5, 5))
    for seed in range(400):
        features.redraw(seed)
        similarity, x = similarities(features, qk)
        q = np.einsum("bihk,km->bihm", qk.numpy()[:, :, :HEADS], _projection(features))
        most = q.max(-1).transpose(0, 2, 1)[..., None] / WIDTH**0.25
        norm = (qk.numpy()[:, :, :HEADS] ** 2).sum(-1).transpose(0, 2, 1)[..., None] / WIDTH**0.5
        total += similarity * np.exp(most - norm / 2) / features.size  # the factors left out
    np.testing.assert_allclose(total / 400, np.exp(x), rtol=0.03)


def test_favor_directions_are_orthogonal_and_lengths_normal() -> None:
    features = make("favor", 200 * WIDTH)
    blocks = _projection(features).T.reshape(200, WIDTH, WIDTH)  # block, column, channel
    gram = blocks @ blocks.transpose(0, 2, 1)
    lengths = np.einsum("bii->bi", gram)
    np.testing.assert_allclose(gram - lengths[..., None] * np.eye(WIDTH), 0, atol=1e-5)
    np.testing.assert_allclose(lengths.mean(), WIDTH, rtol=0.1)
    np.testing.assert_allclose(lengths.var(), 2 * WIDTH, rtol=0.2)  # chi squared
    np.testing.assert_allclose(blocks.mean((0, 1)), 0, atol=0.15)


def test_a_count_that_fills_no_block() -> None:
    w = _projection(make("favor", WIDTH + 2))
    assert w.shape == (WIDTH, WIDTH + 2)
    first = w.T[:WIDTH] @ w[:, :WIDTH]
    np.testing.assert_allclose(first, np.diag(np.diag(first)), atol=1e-5)


def test_favor_is_bounded_for_large_inputs() -> None:
    features = make("favor", 4 * WIDTH)
    q, k = features(numbers(scale=100.0).float())
    assert q.isfinite().all() and k.isfinite().all()
    assert q.amax() <= 1 and torch.equal(q.amax(-1), torch.ones_like(q[..., 0]))
    bound = np.exp((_projection(features) ** 2).sum(0) / 2)
    aligned = torch.from_numpy(_projection(features).T.copy()) * WIDTH**0.25
    _, k = features.double()(aligned[None, :, None].expand(1, -1, 2 * HEADS, -1))
    assert (k.numpy() <= bound * (1 + 1e-6)).all()


def test_redraw_and_seed_stand_in_the_checkpoint(tmp_path: Path) -> None:
    first, second = _favor_model(), _favor_model()
    maps = [_favor_of(model) for model in (first, second)]
    assert not torch.equal(maps[0].projection, maps[1].projection)
    tokenizer = Path(__file__).parents[1] / "examples/demo/checkpoint/tokenizer.json"
    maps[0].redraw(123)
    checkpoint.save(tmp_path, first, tokenizer.read_text())
    loaded = _favor_of(checkpoint.load(tmp_path)[0])
    assert int(loaded.seed) == 123 and torch.equal(loaded.projection, maps[0].projection)
    maps[1].redraw(int(loaded.seed))
    torch.testing.assert_close(maps[1].projection, loaded.projection, rtol=0, atol=1e-5)


def _favor_model() -> SequenceModel:
    table = {"type": "linear_attention", "num_heads": 2, "key_dim": 4, "value_dim": 4}
    config = ModelConfig(
        vocab_size=8192,
        hidden_size=8,
        intermediate_size=8,
        layers=("m",),
        mixers={"m": {**table, "feature_map": "favor"}},
    )
    return SequenceModel(config)


def _favor_of(model: SequenceModel) -> Favor:
    found = model.blocks[0].mixer.feature_map
    assert isinstance(found, Favor)
    return found


@pytest.mark.parametrize("name", feature_maps.NAMES)
def test_maps_are_made_without_memory(name: str) -> None:
    with torch.device("meta"):
        assert make(name).size == make(name).size


def test_an_unknown_map_is_refused() -> None:
    with pytest.raises(
        EdgelinError, match=r"feature_map is 'cosine'; allowed: elu, identity, relu"
    ):
        make("cosine")


def _projection(features: FeatureMap) -> np.ndarray:
    """W `[K, M]` as float64."""
    assert isinstance(features, Favor)
    array: np.ndarray = features.projection[0].double().numpy()
    return array


def test_favor_divides_by_sums_that_large_keys_make_tiny() -> None:
    """One token attends to itself: its output is its value, however large the key is."""
    table = {"type": "linear_attention", "feature_map": "favor", "num_heads": 1}
    sizes = {"key_dim": 64, "value_dim": 8}
    torch.manual_seed(0)
    mixer = mixers.build({**table, **sizes}, 16, 0, 1e-6, where="model.mixers.m")
    state = {spec.name: torch.zeros(1, *spec.shape) for spec in mixer.state_specs()}
    mixer.out_proj = torch.nn.Identity()
    x = torch.randn(1, 1, 16)
    with torch.no_grad():
        mixer.qkv_proj.weight[:128].normal_(std=0.5)  # keys of a spread of about two
        y, _ = mixer(x, state, torch.tensor([0]))
        value = mixer.qkv_proj(x)[..., 128:]
    torch.testing.assert_close(y, value, rtol=1e-4, atol=1e-5)


def test_favor_refuses_keys_that_leave_float32() -> None:
    table = {"type": "linear_attention", "feature_map": "favor", "num_heads": 1}
    with pytest.raises(EdgelinError, match="key_dim is 128; feature_map 'favor' takes at most 96"):
        mixers.build({**table, "key_dim": 128, "value_dim": 8}, 16, 0, 1e-6, where="m")
