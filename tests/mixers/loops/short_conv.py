"""Loop of the mixer ``short_conv``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, convolved, matrix

CASES: dict[str, dict[str, Any]] = {
    "short_conv": {"type": "short_conv"},
    "short_conv, 7 taps, biases": {"type": "short_conv", "conv_size": 7, "bias": True},
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    bias_in, bias_out = (
        (matrix(m, "in_proj.bias"), matrix(m, "out_proj.bias")) if m.config.bias else (0, 0)
    )
    b, c, u = np.split(x @ matrix(m, "in_proj.weight").T + bias_in, 3, axis=-1)
    y, tail = convolved(m, b * u, state["conv.3"])
    return (c * y) @ matrix(m, "out_proj.weight").T + bias_out, {"conv.3": tail}
