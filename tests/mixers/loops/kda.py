"""Loop of the mixer ``kda``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import EPS, LINEAR, Arrays, convolved, heads_of, matrix, memory, sigmoid

CASES: dict[str, dict[str, Any]] = {
    "kda": {"type": "kda", **LINEAR, "conv_size": 3},
    "kda, a key head for two": {"type": "kda", **LINEAR, "num_key_heads": 1},
    "kda, lower bound": {"type": "kda", **LINEAR, "lower_bound": -3.0},
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    groups = c.num_key_heads or c.num_heads
    keys = groups * c.key_dim
    both = x @ matrix(m, "qkv_gate_proj.weight").T
    qkv, tail = convolved(m, both[..., : -c.value_dim], state["conv.3"])
    parts = np.split(qkv * sigmoid(qkv), [keys, 2 * keys], axis=-1)
    q, k, v = map(heads_of, parts, (groups, groups, c.num_heads))
    q, k = (a.repeat(c.num_heads // groups, axis=2) for a in (q, k))
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    gates = x @ matrix(m, "beta_decay_proj.weight").T
    step = gates[..., c.num_heads :] @ matrix(m, "decay_out_proj.weight").T
    step, rate = heads_of(step + matrix(m, "dt_bias"), c.num_heads), np.exp(matrix(m, "A_log"))
    if c.lower_bound is None:
        decay = np.exp(-rate[:, None] * np.logaddexp(0, step))
    else:
        decay = np.exp(c.lower_bound * sigmoid(rate[:, None] * step))
    beta = sigmoid(gates[..., : c.num_heads])
    o, s = memory(q / c.key_dim**0.5, k, v, decay, state["recurrent.3"], beta=beta)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + EPS) * matrix(m, "norm.weight")
    gate = both[..., -c.value_dim :] @ matrix(m, "gate_out_proj.weight").T
    o = o.reshape(*x.shape[:2], -1) * sigmoid(gate + matrix(m, "gate_out_proj.bias"))
    return o @ matrix(m, "out_proj.weight").T, {"conv.3": tail, "recurrent.3": s}
