"""Loop of the mixer ``linear_attention``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import EPS, LINEAR, Arrays, heads_of, matrix, memory

BASE = {"type": "linear_attention", **LINEAR}
CASES: dict[str, dict[str, Any]] = {
    "linear_attention": BASE,
    "linear_attention, identity": {**BASE, "feature_map": "identity", "normalize": "rms"},
    "linear_attention, relu": {**BASE, "feature_map": "relu", "normalize": "rms", "norm_eps": 0.1},
    "linear_attention, product": {**BASE, "feature_map": "product", "normalize": "rms"},
    "linear_attention, favor": {**BASE, "feature_map": "favor", "num_features": 9},
    "linear_attention, taylor": {**BASE, "feature_map": "taylor"},
    "linear_attention, compensated": {**BASE, "compensated": True},
    "linear_attention, hedgehog": {**BASE, "feature_map": "hedgehog", "normalize": "rms"},
}


def favor(m: Any, q: np.ndarray, k: np.ndarray) -> Any:
    """Queries up to a factor, which cancels."""
    w = m.feature_map.projection[0].double().numpy()
    q, k = (x / x.shape[-1] ** 0.25 for x in (q, k))
    return np.exp(q @ w - (q @ w).max(-1, keepdims=True)), np.exp(
        k @ w - (k**2).sum(-1)[..., None] / 2
    )


def taylor(_: Any, *qk: np.ndarray) -> Any:
    """All K^2 products, none packed, in a rotated order that no packing has."""
    out = []
    for x in qk:
        x = x / x.shape[-1] ** 0.25
        second = (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1) / 2**0.5
        out.append(np.concatenate([np.ones_like(x[..., :1]), x, second], axis=-1))
    return out


def hedgehog(m: Any, *qk: np.ndarray) -> Any:
    out = []
    for x, w in zip(qk, np.split(matrix(m, "feature_map.weight"), 2), strict=True):
        x = np.einsum("bthk,hkd->bthd", x, w)
        both = np.exp(np.concatenate([x, -x], axis=-1))
        out.append(both / both.sum(-1, keepdims=True))
    return out


def product(m: Any, *qk: np.ndarray) -> Any:
    out = []
    weights, biases = (np.split(matrix(m, f"feature_map.{n}"), 2) for n in ("weight", "bias"))
    for x, w, b in zip(qk, weights, biases, strict=True):
        both = np.einsum("bthk,hkd->bthd", x, w) + b[:, 0]
        out.append(both[..., : x.shape[-1]] * both[..., x.shape[-1] :])
    return out


MAPS = {
    "elu": lambda _, *qk: [np.where(a > 0, a + 1, np.exp(a)) for a in qk],
    "identity": lambda _, *qk: qk,
    "relu": lambda _, *qk: [np.maximum(a, 0) for a in qk],
    "product": product,
    "favor": favor,
    "taylor": taylor,
    "hedgehog": hedgehog,
}


def added_to_sum(m: Any) -> float:
    """Performer's keys may have tiny features, so that their sum has a tinier bound."""
    return 1e-30 if m.config.feature_map == "favor" else 1e-6


def pack(m: Any, features: np.ndarray) -> np.ndarray:
    """Features on the last axis as the mixer stores them: x_i x_j once, times sqrt(2)."""
    width = m.config.key_dim
    if m.config.feature_map != "taylor" or features.shape[-1] != 1 + width + width**2:
        return features
    i, j = np.triu_indices(width)
    second = features[..., 1 + width :].reshape(*features.shape[:-1], width, width)
    kept = second[..., i, j] * np.where(i == j, 1, 2**0.5)
    return np.concatenate([features[..., : 1 + width], kept], axis=-1)


def two_sums(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, state: Arrays, names: list[str], start: np.ndarray
) -> tuple[np.ndarray, Arrays]:
    """Row by row and token by token: a sum that is emptied whenever 4,096 tokens are full."""
    old, new, out = state[names[0]].copy(), state[names[1]].copy(), []
    for t in range(q.shape[1]):
        new = new + k[:, t, :, :, None] * v[:, t, :, None]
        out.append(np.einsum("bhkv,bhk->bhv", old + new, q[:, t]))
        for row in np.flatnonzero((start + t + 1) % 4096 == 0):
            old[row], new[row] = old[row] + new[row], 0
    return np.stack(out, axis=1), dict(zip(names, (old, new), strict=True))


def compensated(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, state: Arrays, position: np.ndarray
) -> tuple[np.ndarray, Arrays]:
    """Numerators over sums of weights where there is z."""
    o, after = two_sums(q, k, v, state, ["recurrent.3", "recurrent_recent.3"], position)
    if "normalizer.3" not in state:
        return o, after
    names = ["normalizer.3", "normalizer_recent.3"]
    z = {name: state[name][..., None] for name in names}
    den, z = two_sums(q, k, np.ones((*q.shape[:3], 1)), z, names, position)
    return o / (den + 1e-6), {**after, **{name: a[..., 0] for name, a in z.items()}}


def loop(
    m: Any, x: np.ndarray, state: Arrays, position: np.ndarray, decay: np.ndarray | None = None
) -> Any:
    c = m.config
    q, k, v = np.split(
        x @ matrix(m, "qkv_proj.weight").T, np.cumsum([c.num_heads * c.key_dim] * 2), axis=-1
    )
    q, k, v = (heads_of(a, c.num_heads) for a in (q, k, v))
    q, k = (pack(m, a) for a in MAPS[c.feature_map](m, q, k))
    one = np.ones((*x.shape[:2], c.num_heads, 1))
    a = one if decay is None else one * decay[:, None]
    k = k if decay is None else k * (1 - a)
    if c.compensated:
        o, after = compensated(q, k, v, state, position)
    else:
        o, s = memory(q, k, v, a, state["recurrent.3"])
        after = {"recurrent.3": s}
    if c.normalize == "z" and not c.compensated:
        den, z = memory(q, k, one, a, state["normalizer.3"][..., None])
        o = o / (den + added_to_sum(m))
        after["normalizer.3"] = z[..., 0]
    if c.normalize == "rms":
        o = (
            o
            / np.sqrt((o**2).mean(-1, keepdims=True) + (c.norm_eps or EPS))
            * matrix(m, "norm.weight")
        )
    return o.reshape(*x.shape[:2], -1) @ matrix(m, "out_proj.weight").T, after
