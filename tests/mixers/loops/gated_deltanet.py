"""Loop of the mixer ``gated_deltanet``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import EPS, LINEAR, Arrays, convolved, heads_of, matrix, memory, sigmoid

CASES: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"type": "gated_deltanet", **LINEAR, "conv_size": 3},
    "gated_deltanet, key heads for two, beta to 2": {
        "type": "gated_deltanet",
        **LINEAR,
        "num_heads": 4,
        "num_key_heads": 2,
        "allow_neg_eigval": True,
        "norm_eps": 0.01,
    },
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    groups = c.num_key_heads or c.num_heads
    keys, values = groups * c.key_dim, c.num_heads * c.value_dim
    both = x @ matrix(m, "qkv_gate_proj.weight").T
    gated = c.output_gate
    qkv, tail = convolved(m, both[..., :-values] if gated else both, state["conv.3"])
    qkv = qkv * sigmoid(qkv)
    parts = (*np.split(qkv, [keys, 2 * keys], axis=-1), both[..., -values:])
    q, k, v, gate = map(heads_of, parts, (groups, groups, c.num_heads, c.num_heads))
    q, k = (a[:, :, [h * groups // c.num_heads for h in range(c.num_heads)]] for a in (q, k))
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    gates = x @ matrix(m, "beta_decay_proj.weight").T
    most = 2 if c.allow_neg_eigval else 1
    beta, decay = most * sigmoid(gates[..., : c.num_heads]), np.ones((*x.shape[:2], c.num_heads))
    if m.decays:
        step = np.log1p(np.exp(gates[..., c.num_heads :] + matrix(m, "dt_bias")))
        decay = np.exp(-np.exp(matrix(m, "A_log")) * step)
    o, s = memory(q / c.key_dim**0.5, k, v, decay[..., None], state["recurrent.3"], beta=beta)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + (c.norm_eps or EPS))
    o = o * matrix(m, "norm.norm.weight") * (gate * sigmoid(gate) if gated else 1)
    y = o.reshape(*x.shape[:2], -1) @ matrix(m, "out_proj.weight").T
    return y, {"conv.3": tail, "recurrent.3": s}
