"""Loop of the mixer ``mamba2``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import EPS, Arrays, convolved, heads_of, linear, matrix, memory, sigmoid

_SIZES = {"type": "mamba2", "num_heads": 4, "head_dim": 5, "state_size": 6}
CASES: dict[str, dict[str, Any]] = {
    "mamba2": {**_SIZES, "conv_size": 3},
    "mamba2, 2 groups": {**_SIZES, "num_groups": 2},
    "mamba2, biases": {**_SIZES, "bias": True, "out_bias": True, "conv_bias": False},
    "mamba2, norm before gate": {**_SIZES, "num_groups": 2, "norm": "before_gate", "max_dt": 0.03},
    "mamba2, no norm": {**_SIZES, "norm": "none", "min_dt": 0.01},
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    inner, states = c.num_heads * c.head_dim, c.num_groups * c.state_size
    both = linear(m, "in_proj", x)
    z, xbc = both[..., :inner], both[..., inner:]
    xbc, tail = convolved(m, xbc, state["conv.3"])
    xbc = xbc * sigmoid(xbc)
    u = heads_of(xbc[..., :inner], c.num_heads)
    b, q = np.split(xbc[..., inner:], [states], axis=-1)
    groups = [h * c.num_groups // c.num_heads for h in range(c.num_heads)]
    b, q = (heads_of(a, c.num_groups)[:, :, groups] for a in (b, q))
    dt = np.logaddexp(0, x @ matrix(m, "dt_proj.weight").T + matrix(m, "dt_bias"))[..., None]
    dt = np.minimum(np.maximum(dt, c.min_dt), np.inf if c.max_dt is None else c.max_dt)
    decay = np.exp(-np.exp(matrix(m, "A_log"))[:, None] * dt)
    o, s = memory(q, b, dt * u, decay, state["recurrent.3"])
    o = (o + matrix(m, "D")[:, None] * u).reshape(z.shape)
    z = z * sigmoid(z)
    if c.norm != "none":
        o = o * z if c.norm == "after_gate" else o
        for group in np.split(np.arange(inner), c.num_groups):
            o[..., group] /= np.sqrt((o[..., group] ** 2).mean(-1, keepdims=True) + EPS)
        o = o * matrix(m, "norm.weight")
    y = linear(m, "out_proj", o if c.norm == "after_gate" else o * z)
    return y, {"conv.3": tail, "recurrent.3": s}
