"""Loop of the mixer ``rnn``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, matrix, sigmoid

BASE = {"type": "rnn", "inner_size": 9}
CASES: dict[str, dict[str, Any]] = {
    "rnn": BASE,
    "rnn, identity": {**BASE, "activation": "identity"},
    "rnn, sigmoid": {**BASE, "activation": "sigmoid"},
    "rnn, full": {**BASE, "recurrence": "full"},
    "rnn, full, relu": {**BASE, "recurrence": "full", "activation": "relu"},
    "rnn, full, identity": {**BASE, "recurrence": "full", "activation": "identity"},
}
FUNCTIONS = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.where(x > 0, x, 0),
    "sigmoid": sigmoid,
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    f = FUNCTIONS[m.config.activation]
    u, gate = np.split(x @ matrix(m, "in_gate_proj.weight").T, 2, axis=-1)
    if m.config.recurrence == "full":
        w = matrix(m, "recurrent_weight")
    else:
        a = np.exp(-np.exp(matrix(m, "nu")))
        w, u = np.diag(a), u * np.sqrt(1 - a**2)
    z, outputs = state["rnn.3"], []
    for t in range(x.shape[1]):
        z = f(z @ w + u[:, t])
        outputs.append(z)
    y = np.stack(outputs, axis=1) * gate * sigmoid(gate)
    return y @ matrix(m, "out_proj.weight").T, {"rnn.3": z}
