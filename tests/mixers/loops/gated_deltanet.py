"""Loop of the mixer ``gated_deltanet``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import LINEAR, Arrays, convolved, gated_output, heads_of, matrix, memory, sigmoid

CASES: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"type": "gated_deltanet", **LINEAR, "conv_size": 3}
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    keys, values = c.num_heads * c.key_dim, c.num_heads * c.value_dim
    both = x @ matrix(m, "qkv_gate_proj.weight").T
    qkv, tail = convolved(m, both[..., :-values], state["conv.3"])
    qkv = qkv * sigmoid(qkv)
    parts = (*np.split(qkv, [keys, 2 * keys], axis=-1), both[..., -values:])
    q, k, v, gate = (heads_of(a, c.num_heads) for a in parts)
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    gates = x @ matrix(m, "beta_decay_proj.weight").T
    beta, decay = sigmoid(gates[..., : c.num_heads]), np.ones((*x.shape[:2], c.num_heads))
    if m.decays:
        step = np.log1p(np.exp(gates[..., c.num_heads :] + matrix(m, "dt_bias")))
        decay = np.exp(-np.exp(matrix(m, "A_log")) * step)
    o, s = memory(q / c.key_dim**0.5, k, v, decay[..., None], state["recurrent.3"], beta=beta)
    return gated_output(m, o, gate), {"conv.3": tail, "recurrent.3": s}
