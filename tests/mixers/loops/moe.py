"""Loop of the mixer ``moe``, token by token and expert by expert."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, matrix, sigmoid

_SIZES = {"type": "moe", "num_experts": 5, "experts_per_token": 2, "intermediate_size": 9}
CASES: dict[str, dict[str, Any]] = {
    "moe": _SIZES,
    "moe, one": {**_SIZES, "experts_per_token": 1, "norm_topk_prob": False},
    "moe, all": {**_SIZES, "num_experts": 3, "experts_per_token": 3, "norm_topk_prob": False},
    "moe, sigmoid": {**_SIZES, "router": "sigmoid", "norm_topk_prob": False},
    "moe, sigmoid, bias": {**_SIZES, "router": "sigmoid", "expert_bias": True},
    "moe, shared": {**_SIZES, "shared_size": 7},
    "moe, gated shared": {**_SIZES, "shared_size": 7, "shared_gate": True},
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    y = np.zeros_like(x)
    both, down = matrix(m, "experts.gate_up_proj"), matrix(m, "experts.down_proj")
    for b, t in np.ndindex(x.shape[:2]):
        u = x[b, t]
        for expert, weight in _route(m, matrix(m, "router.weight") @ u).items():
            y[b, t] += weight * _mlp(both[expert, 0::2], both[expert, 1::2], down[expert], u)
        if m.config.shared_size:
            gate, up = np.split(matrix(m, "shared.gate_up_proj.weight"), 2)
            shared = _mlp(gate, up, matrix(m, "shared.down_proj.weight"), u)
            if m.config.shared_gate:
                shared = shared * sigmoid(matrix(m, "shared_router.weight") @ u)
            y[b, t] += shared
    return y, {}


def _route(m: Any, logits: np.ndarray) -> dict[int, float]:
    """Weight of every chosen expert."""
    scores = sigmoid(logits)
    if m.config.router == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum()
    bias = m.expert_bias.double().numpy() if m.config.expert_bias else 0
    ranked = np.argsort(-(scores + bias), kind="stable")
    chosen = ranked[: m.config.experts_per_token]
    total = 1.0
    if m.config.norm_topk_prob:
        total = scores[chosen].sum() + (1e-6 if m.config.router == "sigmoid" else 0)
    return {int(e): scores[e] / total for e in chosen}


def _mlp(gate: np.ndarray, up: np.ndarray, down: np.ndarray, x: np.ndarray) -> np.ndarray:
    inner: np.ndarray = gate @ x
    result: np.ndarray = down @ (inner * sigmoid(inner) * (up @ x))
    return result
