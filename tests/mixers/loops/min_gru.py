"""Loop of the mixer ``min_gru``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, matrix, sigmoid

CASES: dict[str, dict[str, Any]] = {"min_gru": {"type": "min_gru", "inner_size": 14}}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    u, gate = np.split(x @ matrix(m, "in_gate_proj.weight").T, 2, axis=-1)
    z = sigmoid(x @ matrix(m, "decay_proj.weight").T + matrix(m, "decay_proj.bias"))
    h, outputs = state["ssm.3"][..., 0], []
    for t in range(x.shape[1]):
        h = (1 - z[:, t]) * h + z[:, t] * u[:, t]
        outputs.append(h)
    y = np.stack(outputs, axis=1) * gate * sigmoid(gate)
    return y @ matrix(m, "out_proj.weight").T, {"ssm.3": h[..., None]}
