"""Loop of the mixer ``rwkv7``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import LINEAR, Arrays, heads_of, matrix, sigmoid

CASES: dict[str, dict[str, Any]] = {
    "rwkv7": {
        "type": "rwkv7",
        **LINEAR,
        "decay_rank": 4,
        "beta_rank": 3,
        "value_rank": 5,
        "gate_rank": 7,
    }
}
CASES["rwkv7, own eps"] = {**CASES["rwkv7"], "norm_eps": 0.3, "key_norm_eps": 0.2}


def low_rank(m: Any, x: np.ndarray, name: str, inner: Any = None) -> np.ndarray:
    """The two projections ``name_in_proj`` and ``name_out_proj``, the second with its bias."""
    low = x @ matrix(m, f"{name}_in_proj.weight").T
    low = low if inner is None else inner(low)
    bias = 0 if name == "gate" else matrix(m, f"{name}_out_proj.bias")
    return low @ matrix(m, f"{name}_out_proj.weight").T + bias


def loop(
    m: Any, x: np.ndarray, state: Arrays, _: np.ndarray, first: np.ndarray | None = None
) -> Any:
    """``first``: the values of the first layer, for a layer that follows it."""
    c = m.config
    late = np.concatenate([state["shift.3"][:, None], x], axis=1)[:, :-1]
    xr, xw, xk, xv, xa, xg = (x + (late - x) * share for share in matrix(m, "mix"))
    r, k, v = (
        y @ matrix(m, f"{n}_proj.weight").T for n, y in zip("rkv", (xr, xk, xv), strict=True)
    )
    if first is not None:
        share = sigmoid(low_rank(m, xv, "value_beta"))
        v = (1 - share) * v + share * first
    decay = np.exp(-np.exp(-0.5) * sigmoid(low_rank(m, xw, "decay", np.tanh)))
    rate = sigmoid(low_rank(m, xa, "beta"))
    kk = k * matrix(m, "k_k")
    k = k * (1 + (rate - 1) * matrix(m, "k_a"))
    r, kk, k, v, decay, rate = (heads_of(y, c.num_heads) for y in (r, kk, k, v, decay, rate))
    kk = kk / np.sqrt((kk**2).sum(-1, keepdims=True) + c.key_norm_eps)
    s, outputs = state["recurrent.3"].copy(), []
    for t in range(x.shape[1]):
        removed = np.einsum("bhkv,bhk->bhv", s, kk[:, t])
        s = decay[:, t, :, :, None] * s
        s = s - np.einsum("bhk,bhv->bhkv", kk[:, t] * rate[:, t], removed)
        s = s + np.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(np.einsum("bhkv,bhk->bhv", s, r[:, t]))
    o = np.stack(outputs, axis=1)
    o = o - o.mean(-1, keepdims=True)
    eps = c.norm_eps or c.value_dim * 1e-5
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + eps)
    o = o.reshape(*x.shape[:2], -1) * matrix(m, "norm.weight") + matrix(m, "norm.bias")
    bonus = (r * k * matrix(m, "r_k")).sum(-1, keepdims=True) * v
    y = (o + bonus.reshape(o.shape)) * low_rank(m, xg, "gate", sigmoid)
    after = {"shift.3": x[:, -1], "recurrent.3": s}
    return y @ matrix(m, "out_proj.weight").T, after
