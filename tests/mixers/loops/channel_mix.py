"""Loop of the mixer ``channel_mix``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, linear, matrix, sigmoid

CASES: dict[str, dict[str, Any]] = {
    "channel_mix": {"type": "channel_mix", "intermediate_size": 14},
    "channel_mix, receptance": {"type": "channel_mix", "intermediate_size": 9, "receptance": True},
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    last, shares, outputs = state["mlp_shift.3"], matrix(m, "mix"), []
    for t in range(x.shape[1]):
        mixed = [share * last + (1 - share) * x[:, t] for share in shares]
        inner = np.where(mixed[0] @ matrix(m, "up_proj.weight").T > 0, 1, 0)
        y = linear(m, "down_proj", inner * linear(m, "up_proj", mixed[0]) ** 2)
        if m.config.receptance:
            y = y * sigmoid(linear(m, "gate_proj", mixed[1]))
        outputs.append(y)
        last = x[:, t]
    return np.stack(outputs, axis=1), {"mlp_shift.3": last}
