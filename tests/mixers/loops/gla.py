"""Loop of the mixer ``gla``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import LINEAR, Arrays, gated_output, heads_of, matrix, memory, sigmoid

CASES: dict[str, dict[str, Any]] = {"gla": {"type": "gla", **LINEAR, "decay_rank": 4}}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    sizes = [c.num_heads * c.key_dim] * 2 + [c.num_heads * c.value_dim]
    parts = np.split(x @ matrix(m, "qkv_gate_proj.weight").T, np.cumsum(sizes), axis=-1)
    q, k, v, gate = (heads_of(a, c.num_heads) for a in parts)
    low = x @ matrix(m, "decay_in_proj.weight").T
    low = low @ matrix(m, "decay_out_proj.weight").T + matrix(m, "decay_out_proj.bias")
    decay = heads_of(sigmoid(low) ** (1 / 16), c.num_heads)
    o, s = memory(q / c.key_dim**0.5, k, v, decay, state["recurrent.3"])
    return gated_output(m, o, gate), {"recurrent.3": s}
