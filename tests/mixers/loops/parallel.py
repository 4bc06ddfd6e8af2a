"""Loop of the mixer ``parallel``: the loops of its parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops import attention, mamba2
from loops.common import Arrays

_LOOPS = {"attention": attention.loop, "mamba2": mamba2.loop}
_MAMBA2 = {"type": "mamba2", "num_heads": 4, "head_dim": 5, "state_size": 6, "num_groups": 2}
_WINDOW = {"type": "attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "window": 70}
CASES: dict[str, dict[str, Any]] = {
    "parallel": {"type": "parallel", "parts": [_MAMBA2, _WINDOW]},
}


def loop(m: Any, x: np.ndarray, state: Arrays, position: np.ndarray) -> Any:
    y, after = np.zeros(x.shape), {}
    for table, part in zip(m.config.parts, m.parts, strict=True):
        own = {spec.kind + ".3": state[spec.kind + ".3"] for spec in part.state_specs()}
        output, own = _LOOPS[table["type"]](part, x, own, position)
        y, after = y + output, after | own
    return y, after
