"""Loop of the mixer ``moe``, token by token and expert by expert."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops import mlp
from loops.common import Arrays, linear, matrix, sigmoid

_SIZES = {"type": "moe", "num_experts": 5, "experts_per_token": 2, "intermediate_size": 9}
CASES: dict[str, dict[str, Any]] = {
    "moe": _SIZES,
    "moe, one": {**_SIZES, "experts_per_token": 1, "norm_topk_prob": False},
    "moe, all": {**_SIZES, "num_experts": 3, "experts_per_token": 3, "norm_topk_prob": False},
    "moe, sigmoid": {**_SIZES, "router": "sigmoid", "norm_topk_prob": False},
    "moe, sigmoid, bias": {**_SIZES, "router": "sigmoid", "expert_bias": True},
    "moe, shared": {**_SIZES, "shared_size": 7},
    "moe, gated shared": {**_SIZES, "shared_size": 7, "shared_gate": True},
    "moe, relu2": {
        **_SIZES, "router": "sigmoid", "gated": False, "shared_size": 7, "latent_size": 12,
    },
    "moe, groups": {
        **_SIZES, "num_experts": 9, "router": "sigmoid", "expert_bias": True, "num_groups": 3,
        "groups_per_token": 2, "sum_eps": 0.5,
    },
}  # fmt: skip


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    y = np.zeros_like(x)
    latent = linear(m, "in_proj", x) if m.config.latent_size else x
    for b, t in np.ndindex(x.shape[:2]):
        u = x[b, t]
        chosen = _route(m, matrix(m, "router.weight") @ u)
        total = sum(weight * _expert(m, e, latent[b, t]) for e, weight in chosen.items())
        y[b, t] = linear(m, "out_proj", total) if m.config.latent_size else total
        if m.config.shared_size:
            shared = mlp.loop(m.shared, u, {}, _)[0]
            if m.config.shared_gate:
                shared = shared * sigmoid(matrix(m, "shared_router.weight") @ u)
            y[b, t] += shared
    return y, {}


def _route(m: Any, logits: np.ndarray) -> dict[int, float]:
    """Weight of every chosen expert."""
    c, scores = m.config, sigmoid(logits)
    if c.router == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum()
    ranks = scores + (m.expert_bias.double().numpy() if c.expert_bias else 0)
    groups = np.split(np.arange(c.num_experts), c.num_groups)
    if c.num_groups > 1:
        groups = sorted(groups, key=lambda group: -np.sort(ranks[group])[-2:].sum())
        groups = groups[: c.groups_per_token]
    allowed = np.concatenate(groups)
    chosen = sorted(allowed, key=lambda expert: -ranks[expert])[: c.experts_per_token]
    total = 1.0
    if c.norm_topk_prob:
        total = scores[chosen].sum() + (c.sum_eps if c.router == "sigmoid" else 0)
    return {int(e): scores[e] / total for e in chosen}


def _expert(m: Any, expert: int, x: np.ndarray) -> np.ndarray:
    down = matrix(m, "experts.down_proj")[expert]
    if m.config.gated:
        both = matrix(m, "experts.gate_up_proj")[expert]
        gate: np.ndarray = both[0::2] @ x
        inner = gate * sigmoid(gate) * (both[1::2] @ x)
    else:
        inner = np.maximum(matrix(m, "experts.up_proj")[expert] @ x, 0) ** 2
    result: np.ndarray = down @ inner
    return result
