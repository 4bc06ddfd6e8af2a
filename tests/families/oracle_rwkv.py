"""RWKV-6 and RWKV-7 in float64, token by token, from RWKV-LM's ``rwkv_v7_numpy.py``, its model
code and the papers' equations; weights have the names of the authors' ``.pth`` files.

``as_fla`` renames them as fla's ``convert_from_rwkv6.py`` and ``convert_from_rwkv7.py`` do.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import oracle
from oracle_fla import Published, Weights, drawn, layer_norm, shifted, sigmoid

HIDDEN, LAYERS = 32, 3
CENTRES = {
    r"ln\w+\.weight": 1.0,
    r"ln\w+\.bias": 0.0,
    r"att\.x_|ffn\.x_|time_maa_[xwkvrg]$": 0.5,
    r"k_k": 0.8,
    r"k_a": 1.0,
    r"w0": -1.0,
    r"time_decay$": -1.5,
    r"r_k|time_faaaa": 0.3,
}


def shell(vocabulary: int = oracle.VOCABULARY, width: int = 64) -> dict[str, tuple[int, ...]]:
    """Shapes around the mixers of both versions."""
    shapes: dict[str, tuple[int, ...]] = {"emb.weight": (vocabulary, HIDDEN)}
    norms = ["blocks.0.ln0", "ln_out"]
    norms += [f"blocks.{i}.ln{n}" for i in range(LAYERS) for n in (1, 2)]
    for norm in norms:
        shapes |= {f"{norm}.weight": (HIDDEN,), f"{norm}.bias": (HIDDEN,)}
    for i in range(LAYERS):
        shapes[f"blocks.{i}.ffn.key.weight"] = (width, HIDDEN)
        shapes[f"blocks.{i}.ffn.value.weight"] = (HIDDEN, width)
    return shapes | {"head.weight": (vocabulary, HIDDEN)}


def rwkv7_weights(key: int = 8, value: int = HIDDEN) -> Weights:
    """Random weights; ranks differ, and the first layer has the share of values it never uses."""
    shapes, vector = shell(), (1, 1, HIDDEN)
    for i in range(LAYERS):
        own = f"blocks.{i}.att."
        shapes |= {f"{own}x_{part}": vector for part in "rwkvag"}
        for letter, rank, out in (("w", 5, HIDDEN), ("a", 6, HIDDEN), ("v", 7, value)):
            shapes |= {f"{own}{letter}0": (1, 1, out), f"{own}{letter}1": (HIDDEN, rank)}
            shapes[f"{own}{letter}2"] = (rank, out)
        shapes |= {f"{own}g1": (HIDDEN, 9), f"{own}g2": (9, value)}
        shapes |= {f"{own}k_k": vector, f"{own}k_a": vector, f"{own}r_k": (HIDDEN // key, key)}
        shapes |= {f"{own}{name}.weight": (HIDDEN, HIDDEN) for name in ("receptance", "key")}
        shapes |= {f"{own}value.weight": (value, HIDDEN), f"{own}output.weight": (HIDDEN, value)}
        shapes |= {f"{own}ln_x.weight": (value,), f"{own}ln_x.bias": (value,)}
        shapes[f"blocks.{i}.ffn.x_k"] = vector
    return drawn(shapes, CENTRES)


def rwkv6_weights(heads: int = 4, key: int = HIDDEN, value: int = HIDDEN) -> Weights:
    """Random weights; ``key`` and ``value`` are widths of all heads."""
    shapes, vector = shell(), (1, 1, HIDDEN)
    for i in range(LAYERS):
        own = f"blocks.{i}.att."
        shapes |= {f"{own}time_maa_{part}": vector for part in "xwkvrg"}
        shapes |= {f"{own}time_maa_w1": (HIDDEN, 15), f"{own}time_maa_w2": (5, 3, HIDDEN)}
        shapes |= {f"{own}time_decay": (1, 1, key), f"{own}time_decay_w1": (HIDDEN, 6)}
        shapes |= {f"{own}time_decay_w2": (6, key), f"{own}time_faaaa": (heads, key // heads)}
        for name, out in (("receptance", key), ("key", key), ("value", value), ("gate", value)):
            shapes[f"{own}{name}.weight"] = (out, HIDDEN)
        shapes[f"{own}output.weight"] = (HIDDEN, value)
        shapes |= {f"{own}ln_x.weight": (value,), f"{own}ln_x.bias": (value,)}
        shapes |= {f"blocks.{i}.ffn.time_maa_{part}": vector for part in "kr"}
        shapes[f"blocks.{i}.ffn.receptance.weight"] = (HIDDEN, HIDDEN)
    return drawn(shapes, CENTRES)


def norm(w: Weights, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    """A LayerNorm of the stream, which fla may have without a bias."""
    return layer_norm(x, w[f"{name}.weight"], w.get(f"{name}.bias", 0), eps)


def logits(w: Weights, tokens: np.ndarray, mix: Any, ffn: Any, eps: float = 1e-5) -> np.ndarray:
    """The model around the two mixings."""
    x, shared = w["emb.weight"][tokens], {}
    if "blocks.0.ln0.weight" in w:
        x = norm(w, "blocks.0.ln0", x, eps)
    for i in range(LAYERS):
        x = x + mix(w, f"blocks.{i}.att.", norm(w, f"blocks.{i}.ln1", x, eps), shared)
        x = x + ffn(w, f"blocks.{i}.ffn.", norm(w, f"blocks.{i}.ln2", x, eps))
    return norm(w, "ln_out", x, eps) @ w.get("head.weight", w["emb.weight"]).T


def mix7(head_eps: float = 64e-5, kk_eps: float | None = None) -> Any:
    """RWKV-7's time mixing; ``kk_eps`` of fla's fused code, None: torch's normalize."""

    def mix(w: Weights, p: str, x: np.ndarray, shared: dict[str, np.ndarray]) -> np.ndarray:
        late = shifted(x)
        xr, xw, xk, xv, xa, xg = (x + w[f"{p}x_{n}"] * (late - x) for n in "rwkvag")
        r = xr @ w[f"{p}receptance.weight"].T
        k, v = xk @ w[f"{p}key.weight"].T, xv @ w[f"{p}value.weight"].T
        decay = sigmoid(np.tanh(xw @ w[f"{p}w1"]) @ w[f"{p}w2"] + w[f"{p}w0"])
        decay = np.exp(-decay / np.e**0.5)
        if "v_first" in shared:
            share = sigmoid(xv @ w[f"{p}v1"] @ w[f"{p}v2"] + w[f"{p}v0"])
            v = v + (shared["v_first"] - v) * share
        else:
            shared["v_first"] = v
        a = sigmoid(xa @ w[f"{p}a1"] @ w[f"{p}a2"] + w[f"{p}a0"])
        gate = sigmoid(xg @ w[f"{p}g1"]) @ w[f"{p}g2"]
        kk, k = k * w[f"{p}k_k"], k + k * (a - 1) * w[f"{p}k_a"]
        heads = w[f"{p}r_k"].shape[0]
        r, decay, k, v, kk, a = (
            y.reshape(*x.shape[:2], heads, -1) for y in (r, decay, k, v, kk, a)
        )
        length = np.sqrt((kk**2).sum(-1, keepdims=True) + (kk_eps or 0))
        kk = kk / np.maximum(length, 1e-12)
        state = np.zeros((len(x), heads, v.shape[-1], k.shape[-1]))  # values first, as published
        outputs = []
        for t in range(x.shape[1]):
            removed = np.einsum("bhij,bhj->bhi", state, kk[:, t])
            state = state * decay[:, t, :, None]
            state = state - removed[..., None] * (kk * a)[:, t, :, None]
            state = state + v[:, t, :, :, None] * k[:, t, :, None]
            outputs.append(np.einsum("bhij,bhj->bhi", state, r[:, t]))
        o = layer_norm(np.stack(outputs, 1), 1.0, 0.0, head_eps).reshape(*x.shape[:2], -1)
        o = o * w[f"{p}ln_x.weight"] + w[f"{p}ln_x.bias"]
        o = o + ((r * k * w[f"{p}r_k"]).sum(-1, keepdims=True) * v).reshape(o.shape)
        return (o * gate) @ w[f"{p}output.weight"].T

    return mix


def ffn7(w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    """RWKV-7's channel mixing."""
    xk = x + w[f"{p}x_k"] * (shifted(x) - x)
    return np.maximum(xk @ w[f"{p}key.weight"].T, 0) ** 2 @ w[f"{p}value.weight"].T


def mix6(head_eps: float = 64e-5) -> Any:
    """RWKV-6's time mixing."""

    def mix(w: Weights, p: str, x: np.ndarray, _: dict[str, np.ndarray]) -> np.ndarray:
        change = shifted(x) - x
        low = np.tanh((x + change * w[f"{p}time_maa_x"]) @ w[f"{p}time_maa_w1"])
        low = low.reshape(*x.shape[:2], 5, -1)
        mixed = [
            x + change * (w[f"{p}time_maa_{part}"] + low[:, :, i] @ w[f"{p}time_maa_w2"][i])
            for i, part in enumerate("wkvrg")
        ]
        xw, xk, xv, xr, xg = mixed
        names = ("receptance", xr), ("key", xk), ("value", xv), ("gate", xg)
        r, k, v, gate = (y @ w[f"{p}{name}.weight"].T for name, y in names)
        d = w[f"{p}time_decay"] + np.tanh(xw @ w[f"{p}time_decay_w1"]) @ w[f"{p}time_decay_w2"]
        u = w[f"{p}time_faaaa"]
        decay = np.exp(-np.exp(d))
        r, k, v, decay = (y.reshape(*x.shape[:2], len(u), -1) for y in (r, k, v, decay))
        state, outputs = np.zeros((len(x), len(u), k.shape[-1], v.shape[-1])), []
        for t in range(x.shape[1]):
            write = k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append(np.einsum("bhk,bhkv->bhv", r[:, t], u[..., None] * write + state))
            state = write + decay[:, t, :, :, None] * state
        o = layer_norm(np.stack(outputs, 1), 1.0, 0.0, head_eps).reshape(*x.shape[:2], -1)
        o = o * w[f"{p}ln_x.weight"] + w[f"{p}ln_x.bias"]
        return (o * gate * sigmoid(gate)) @ w[f"{p}output.weight"].T

    return mix


def ffn6(w: Weights, p: str, x: np.ndarray) -> np.ndarray:
    """RWKV-6's channel mixing."""
    change = shifted(x) - x
    k = np.maximum((x + change * w[f"{p}time_maa_k"]) @ w[f"{p}key.weight"].T, 0) ** 2
    r = (x + change * w[f"{p}time_maa_r"]) @ w[f"{p}receptance.weight"].T
    return sigmoid(r) * (k @ w[f"{p}value.weight"].T)


def as_fla(weights: Weights) -> Weights:
    """fla's names and shapes."""
    made: Weights = {}
    for name, array in weights.items():
        if not re.fullmatch(r"blocks\.0\.att\.v[012]", name):
            made |= _as_fla(name, array, weights)
    return made


_SHELL = {
    "emb.weight": "model.embeddings.weight", "head.weight": "lm_head.weight",
    "ln_out.weight": "model.norm.weight", "ln_out.bias": "model.norm.bias",
}  # fmt: skip
_MODULES = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att": "attn", "ffn": "ffn"}
_MIXER = {
    "receptance": "r_proj", "key": "k_proj", "value": "v_proj", "gate": "g_proj",
    "output": "o_proj", "ln_x": "g_norm",
}  # fmt: skip


def _as_fla(name: str, array: np.ndarray, weights: Weights) -> Weights:
    """One tensor of either version; those that fla stores together come with the first of them."""
    if name in _SHELL:
        return {_SHELL[name]: array}
    _, layer, module, *rest = name.split(".")
    prefix = f"model.layers.{layer}.{_MODULES[module]}."
    finch = "blocks.0.att.time_maa_x" in weights
    if finch and module == "att":
        return _as_fla6(rest, array, prefix, name.rpartition(".")[0] + ".", weights)
    if finch and module == "ffn":
        if rest[0].startswith("time_maa_"):
            return {f"{prefix}{'key' if rest[0].endswith('k') else 'receptance'}.mu": array.ravel()}
        linear = "" if rest[0] == "value" else "linear."
        return {f"{prefix}{rest[0]}.{linear}weight": array}
    if module == "att" and (low := re.fullmatch(r"([wvag])([012])", rest[0])):
        part = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[low[2]]
        array = array.ravel() if low[2] == "0" else array.T
        return {f"{prefix}{low[1]}_lora.lora.{part}": array}
    if rest[0] in ("k_k", "k_a") or name.endswith("ffn.x_k"):
        return {f"{prefix}{rest[0]}": array.ravel()}
    mapped = _MIXER.get(rest[0], rest[0]) if module == "att" else rest[0]
    return {prefix + ".".join([mapped, *rest[1:]]): array}


def _as_fla6(
    rest: list[str], array: np.ndarray, prefix: str, own: str, weights: Weights
) -> Weights:
    """A tensor of RWKV-6's time mixing: fla's order of the mixtures is r, w, k, v, g."""
    order = [3, 0, 1, 2, 4]
    kind = rest[0]
    if kind == "time_maa_x":
        return {f"{prefix}x_proj.0.mu": array.ravel()}
    if kind == "time_maa_w1":
        parts = np.split(array, 5, axis=1)
        joined = np.concatenate([parts[i] for i in order], axis=1)
        return {f"{prefix}x_proj.0.linear.weight": joined.T}
    if kind == "time_maa_w2":
        return {f"{prefix}x_proj.2.weight": np.concatenate([array[i] for i in order]).T}
    if kind == "time_maa_w":
        bias = [weights[f"{own}time_maa_{part}"].ravel() for part in "rwkvg"]
        return {f"{prefix}x_bias": np.stack(bias)}
    if kind.startswith("time_maa_"):
        return {}
    decay = {"time_decay": "2.bias", "time_decay_w1": "0.weight", "time_decay_w2": "2.weight"}
    if kind in decay:
        array = array.ravel() if kind == "time_decay" else array.T
        return {f"{prefix}w_proj.linear.lora.{decay[kind]}": array}
    if kind == "time_faaaa":
        return {f"{prefix}bonus": array}
    linear = ".linear" if kind in ("receptance", "key", "value", "gate") else ""
    return {f"{prefix}{_MIXER[kind]}{linear}.{rest[1]}": array}


def published(
    weights: Weights, config: dict[str, Any] | None, mix: Any, ffn: Any, eps: float = 1e-5
) -> Published:
    """A model in one of the layouts: fla's with a config, the authors' without."""
    rename = dict if config is None else as_fla
    return Published(weights, config, lambda w, tokens: logits(w, tokens, mix, ffn, eps), rename)
