"""Loop of the mixer ``mamba``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, convolved, matrix, sigmoid

CASES: dict[str, dict[str, Any]] = {
    "mamba": {"type": "mamba", "inner_size": 14, "state_size": 5, "dt_rank": 3, "conv_size": 3},
    "mamba, defaults": {"type": "mamba", "inner_size": 6},
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    u, z = np.split(x @ matrix(m, "in_proj.weight").T, 2, axis=-1)
    u, tail = convolved(m, u, state["conv.3"])
    u = u * sigmoid(u)
    low = u @ matrix(m, "x_proj.weight").T
    size = m.config.state_size
    b, c = low[..., -2 * size : -size], low[..., -size:]
    dt = low[..., : -2 * size] @ matrix(m, "dt_proj.weight").T + matrix(m, "dt_proj.bias")
    dt = np.logaddexp(0, dt)
    h, outputs = state["ssm.3"], []
    for t in range(x.shape[1]):
        decay = np.exp(-np.exp(matrix(m, "A_log")) * dt[:, t, :, None])
        h = decay * h + (dt[:, t] * u[:, t])[:, :, None] * b[:, t, None]
        outputs.append(np.einsum("bdn,bn->bd", h, c[:, t]))
    y = np.stack(outputs, axis=1) + matrix(m, "D") * u
    return (y * z * sigmoid(z)) @ matrix(m, "out_proj.weight").T, {"conv.3": tail, "ssm.3": h}
