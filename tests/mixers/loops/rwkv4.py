"""Loop of the mixer ``rwkv4``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, linear, matrix, sigmoid

CASES: dict[str, dict[str, Any]] = {"rwkv4": {"type": "rwkv4", "inner_size": 14}}


def loop(mixer: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    speed, bonus = np.exp(matrix(mixer, "decay")), matrix(mixer, "bonus")
    shares = matrix(mixer, "mix")
    last, m = state["shift.3"], state["max.3"]
    a, b = state["ssm.3"][..., 0], state["normalizer.3"][..., 0]
    outputs = []
    for t in range(x.shape[1]):
        xk, xv, xr = (share * last + (1 - share) * x[:, t] for share in shares)
        last = x[:, t]
        k, v = linear(mixer, "k_proj", xk), linear(mixer, "v_proj", xv)
        most = np.maximum(m, bonus + k)
        past, own = np.exp(m - most), np.exp(bonus + k - most)
        wkv = (past * a + own * v) / (past * b + own)
        before, m = m, np.maximum(m - speed, k)
        keep, write = np.exp(before - speed - m), np.exp(k - m)
        a, b = keep * a + write * v, keep * b + write
        outputs.append(linear(mixer, "out_proj", wkv * sigmoid(linear(mixer, "r_proj", xr))))
    after = {"shift.3": last, "ssm.3": a[..., None], "normalizer.3": b[..., None], "max.3": m}
    return np.stack(outputs, axis=1), after
