"""Loop of the mixer ``mlstm``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import EPS, LINEAR, Arrays, heads_of, linear, matrix, sigmoid

CASES: dict[str, dict[str, Any]] = {
    "mlstm": {"type": "mlstm", **LINEAR},
    "mlstm, biases, own caps and epsilons": {
        "type": "mlstm",
        **LINEAR,
        "bias": True,
        "gate_softcap": 1.5,
        "eps": 0.05,
        "norm_eps": 0.01,
    },
}


def loop(mixer: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    config = mixer.config
    heads, keys, values = config.num_heads, config.key_dim, config.value_dim
    cuts = np.cumsum([heads * keys, heads * keys, heads * values])
    parts = np.split(linear(mixer, "qkv_gate_proj", x), cuts, axis=-1)
    q, k, v, out_gate = (heads_of(part, heads) for part in parts)
    capped = config.gate_softcap * np.tanh(
        linear(mixer, "beta_decay_proj", x) / config.gate_softcap
    )
    c, n, m = (state[f"{kind}.3"] for kind in ("recurrent", "normalizer", "max"))
    outputs = []
    for t in range(x.shape[1]):
        i, log_f = capped[:, t, :heads], -np.log1p(np.exp(-capped[:, t, heads:]))
        before, m = m, np.maximum(log_f + m, i)
        write, keep = np.exp(i - m)[..., None], np.exp(log_f + before - m)[..., None]
        n = keep * n + write * k[:, t]
        c = keep[..., None] * c + np.einsum("bhk,bhv->bhkv", write * k[:, t], v[:, t])
        read, total = np.einsum("bhkv,bhk->bhv", c, q[:, t]), (n * q[:, t]).sum(-1)
        least = np.maximum(np.abs(total) / keys**0.5, np.exp(-m)) + config.eps
        outputs.append(read / keys**0.5 / least[..., None])
    h = np.stack(outputs, axis=1)
    h = h - h.mean(-1, keepdims=True)
    h = h / np.sqrt((h**2).mean(-1, keepdims=True) + (config.norm_eps or EPS))
    h = h.reshape(*x.shape[:2], -1) * matrix(mixer, "norm.weight") + matrix(mixer, "norm.bias")
    y = linear(mixer, "out_proj", h * sigmoid(out_gate).reshape(h.shape))
    return y, {"recurrent.3": c, "normalizer.3": n, "max.3": m}
