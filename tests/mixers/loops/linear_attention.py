"""Loop of the mixer ``linear_attention``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import LINEAR, Arrays, heads_of, matrix, memory

CASES: dict[str, dict[str, Any]] = {"linear_attention": {"type": "linear_attention", **LINEAR}}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    q, k, v = np.split(
        x @ matrix(m, "qkv_proj.weight").T, np.cumsum([c.num_heads * c.key_dim] * 2), axis=-1
    )
    q, k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q, k))
    q, k, v = (heads_of(a, c.num_heads) for a in (q, k, v))
    one = np.ones((*x.shape[:2], c.num_heads, 1))
    o, s = memory(q, k, v, one, state["recurrent.3"])
    den, z = memory(q, k, one, one, state["normalizer.3"][..., None])
    y = (o / (den + 1e-6)).reshape(*x.shape[:2], -1) @ matrix(m, "out_proj.weight").T
    return y, {"recurrent.3": s, "normalizer.3": z[..., 0]}
