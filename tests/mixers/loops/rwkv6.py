"""Loop of the mixer ``rwkv6``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import EPS, LINEAR, Arrays, heads_of, matrix, sigmoid

CASES: dict[str, dict[str, Any]] = {
    "rwkv6": {"type": "rwkv6", **LINEAR, "mix_rank": 3, "decay_rank": 4}
}
CASES["rwkv6, own eps"] = {**CASES["rwkv6"], "norm_eps": 0.3}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c, u = m.config, matrix(m, "bonus")
    last, s, outputs = state["shift.3"], state["recurrent.3"], []
    for t in range(x.shape[1]):
        xw, xk, xv, xr, xg = mixtures(m, x[:, t], last)
        last = x[:, t]
        low = np.tanh(xw @ matrix(m, "decay_in_proj.weight").T)
        d = low @ matrix(m, "decay_out_proj.weight").T + matrix(m, "decay_out_proj.bias")
        r, k, v = (
            heads_of(a @ matrix(m, f"{name}_proj.weight").T, c.num_heads)
            for name, a in (("r", xr), ("k", xk), ("v", xv))
        )
        write = np.einsum("bhk,bhv->bhkv", k, v)
        o = np.einsum("bhk,bhkv->bhv", r, s + u[:, :, None] * write) / c.key_dim**0.5
        s = heads_of(np.exp(-np.exp(d)), c.num_heads)[..., None] * s + write
        o = (o - o.mean(-1, keepdims=True)) / np.sqrt(
            o.var(-1, keepdims=True) + (c.norm_eps or EPS)
        )
        o = o.reshape(len(o), -1) * matrix(m, "norm.weight") + matrix(m, "norm.bias")
        gate = xg @ matrix(m, "gate_proj.weight").T
        outputs.append((o * gate * sigmoid(gate)) @ matrix(m, "out_proj.weight").T)
    return np.stack(outputs, 1), {"shift.3": last, "recurrent.3": s}


def mixtures(m: Any, x: np.ndarray, last: np.ndarray) -> list[np.ndarray]:
    """w, k, v, r and g of one token and the one before, `[B, D]` each."""
    base = x + (last - x) * matrix(m, "mix_base")
    low = np.split(np.tanh(base @ matrix(m, "mix_in_proj.weight").T), 5, axis=-1)
    return [
        x + (last - x) * (bias + a @ b)
        for a, b, bias in zip(low, matrix(m, "mix_out"), matrix(m, "mix_bias"), strict=True)
    ]
