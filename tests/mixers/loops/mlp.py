"""Loop of the mixer ``mlp``, which has no state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from loops.common import Arrays, linear, sigmoid

_SIZES = {"type": "mlp", "intermediate_size": 9}
CASES: dict[str, dict[str, Any]] = {
    "mlp": _SIZES,
    "mlp, gelu": {**_SIZES, "activation": "gelu"},
    "mlp, gelu_tanh": {**_SIZES, "activation": "gelu_tanh", "bias": True},
    "mlp, relu2": {**_SIZES, "activation": "relu2", "gated": False, "bias": True},
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    if m.config.gated:
        gate, up = np.split(linear(m, "gate_up_proj", x), 2, axis=-1)
        return linear(m, "down_proj", _ACT[m.config.activation](gate) * up), {}
    return linear(m, "down_proj", _ACT[m.config.activation](linear(m, "up_proj", x))), {}


_ACT = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "relu2": lambda x: np.where(x > 0, x, 0) ** 2,
}
