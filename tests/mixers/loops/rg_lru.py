"""Loop of the mixer ``rg_lru``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, convolved, matrix, sigmoid

CASES: dict[str, dict[str, Any]] = {
    f"rg_lru, {blocks} blocks": {
        "type": "rg_lru",
        "inner_size": 12,
        "num_blocks": blocks,
        "conv_size": size,
    }
    for blocks, size in ((1, 4), (3, 2))
} | {
    "rg_lru, biases, unscaled first token": {
        "type": "rg_lru",
        "inner_size": 12,
        "num_blocks": 2,
        "bias": True,
        "unit_first": True,
    }
}


def loop(m: Any, x: np.ndarray, state: Arrays, position: np.ndarray) -> Any:
    c = m.config
    bias_in, bias_out = (
        (matrix(m, "in_gate_proj.bias"), matrix(m, "out_proj.bias")) if c.bias else (0, 0)
    )
    u, z = np.split(x @ matrix(m, "in_gate_proj.weight").T + bias_in, 2, axis=-1)
    u, tail = convolved(m, u, state["conv.3"])
    width = c.inner_size // c.num_blocks
    r, i = np.zeros_like(u), np.zeros_like(u)
    for n in range(c.num_blocks):
        own = slice(n * width, (n + 1) * width)
        for kind, gate in enumerate((r, i)):
            bias = matrix(m, "decay_bias")[kind * c.inner_size :][own]
            gate[..., own] = sigmoid(u[..., own] @ matrix(m, "decay_weight")[kind, n] + bias)
    log_a = -8 * r * np.logaddexp(0, matrix(m, "Lambda"))
    h, outputs = state["ssm.3"][..., 0], []
    for t in range(x.shape[1]):
        kept = np.exp(log_a[:, t])
        factor = np.sqrt(-np.expm1(2 * log_a[:, t]))
        if c.unit_first:
            factor[position + t == 0] = 1
        h = kept * h + factor * i[:, t] * u[:, t]
        outputs.append(h)
    gelu = 0.5 * z * (1 + np.tanh((2 / np.pi) ** 0.5 * (z + 0.044715 * z**3)))
    y = (np.stack(outputs, axis=1) * gelu) @ matrix(m, "out_proj.weight").T + bias_out
    return y, {"conv.3": tail, "ssm.3": h[..., None]}
