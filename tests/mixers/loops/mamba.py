"""Loop of the mixer ``mamba``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, convolved, matrix, sigmoid

CASES: dict[str, dict[str, Any]] = {
    "mamba": {"type": "mamba", "inner_size": 14, "state_size": 5, "dt_rank": 3, "conv_size": 3},
    "mamba, defaults": {"type": "mamba", "inner_size": 6},
    "mamba, biases, norms": {
        "type": "mamba",
        "inner_size": 8,
        "state_size": 4,
        "dt_rank": 3,
        "bias": True,
        "conv_bias": False,
        "inner_norm_eps": 1e-3,
    },
}


def normalised(m: Any, x: np.ndarray, name: str) -> np.ndarray:
    eps = m.config.inner_norm_eps
    if not eps:
        return x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * matrix(m, f"{name}_norm.weight")


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    bias_in, bias_out = (
        (matrix(m, "in_proj.bias"), matrix(m, "out_proj.bias")) if m.config.bias else (0, 0)
    )
    u, z = np.split(x @ matrix(m, "in_proj.weight").T + bias_in, 2, axis=-1)
    u, tail = convolved(m, u, state["conv.3"])
    u = u * sigmoid(u)
    low = u @ matrix(m, "x_proj.weight").T
    size = m.config.state_size
    b = normalised(m, low[..., -2 * size : -size], "b")
    c = normalised(m, low[..., -size:], "c")
    dt = normalised(m, low[..., : -2 * size], "dt")
    dt = dt @ matrix(m, "dt_proj.weight").T + matrix(m, "dt_proj.bias")
    dt = np.logaddexp(0, dt)
    h, outputs = state["ssm.3"], []
    for t in range(x.shape[1]):
        decay = np.exp(-np.exp(matrix(m, "A_log")) * dt[:, t, :, None])
        h = decay * h + (dt[:, t] * u[:, t])[:, :, None] * b[:, t, None]
        outputs.append(np.einsum("bdn,bn->bd", h, c[:, t]))
    y = np.stack(outputs, axis=1) + matrix(m, "D") * u
    y = (y * z * sigmoid(z)) @ matrix(m, "out_proj.weight").T + bias_out
    return y, {"conv.3": tail, "ssm.3": h}
