"""fla's research models (0.6.0) in float64, from the code of its layers and recurrent kernels.

Every mixer is a function of weights (names on disk, behind a prefix), the config, the normed stream
`[B, T, d]` and the layer; ``shapes`` says which weights a config has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
from oracle_fla import (
    Published,
    Weights,
    conv,
    drawn,
    memory,
    rms_norm,
    rotated,
    sigmoid,
    silu,
    unit,
)  # fmt: skip

HIDDEN, LAYERS, WIDTH = 32, 3, 48
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": WIDTH,
    "hidden_act": "swish", "vocab_size": oracle.VOCABULARY, "norm_eps": 1e-3, "attn": None,
    "attn_mode": "chunk", "fuse_norm": True, "fuse_swiglu": True, "fuse_cross_entropy": True,
    "tie_word_embeddings": False, "use_cache": True, "max_position_embeddings": 2048,
    "hidden_ratio": 4, "attnres_block_size": None,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "num_heads": 4, "num_kv_heads": None, "expand_k": 0.5, "expand_v": 1.5, "feature_map": None,
    "use_short_conv": False, "conv_size": 4, "use_output_gate": True, "elementwise_affine": True,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "use_gate": True, "use_short_conv": True, "conv_size": 3, "allow_neg_eigval": False,
    "num_heads": 4,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gla": {**LINEAR, "clamp_min": None, "use_gk": True, "use_gv": False},
    "retnet": LINEAR,
    "delta_net": {
        **DELTA, "use_gate": False, "expand_k": 0.5, "expand_v": 1.5, "use_beta": True,
        "use_output_norm": True, "qk_norm": "l2", "qk_activation": "silu",
    },
    "gated_deltanet": {
        **DELTA, "head_dim": 6, "expand_v": 1.5, "num_v_heads": None,
        "output_gate_activation": "swish",
    },
    "kda": {
        **DELTA, "head_dim": 6, "expand_v": 1.5, "num_v_heads": None, "safe_gate": False,
        "lower_bound": None,
    },
    "hgrn2": {
        "num_heads": None, "expand_ratio": 8, "use_short_conv": False, "conv_size": 4,
        "use_lower_bound": True, "elementwise_affine": True,
    },
    # a large epsilon: a sum that nothing forgets comes near zero, where float32 is noise
    "linear_attn": {
        "norm_eps": 0.1, "num_heads": 4, "num_kv_heads": None, "expand_k": 1.0, "expand_v": 1.5,
        "feature_map": "elementwise_product", "tie_feature_map_qk": False, "norm_q": False,
        "norm_k": False, "norm_feature_map": False, "elementwise_affine": True,
    },
}  # fmt: skip
del CONFIGS["kda"]["use_gate"]
CENTRES = {r"norm\w*\.weight": 1.0, r"conv1d": 0.2, r"A_log": 0.0, r"dt_bias": -1.0, r"bounds": 0.5}


def heads(x: np.ndarray, width: int, group: int = 1) -> np.ndarray:
    """`[B, T, H, width]`, each key head as often as query heads use it."""
    return np.repeat(x.reshape(*x.shape[:2], -1, width), group, axis=2)


def sizes(c: dict[str, Any]) -> tuple[int, int, int, int]:
    """Heads, width of a key and of a value, query heads a key head."""
    count = c["num_heads"]
    key, value = (int(HIDDEN * c[name]) // count for name in ("expand_k", "expand_v"))
    return count, key, value, count // (c["num_kv_heads"] or count)


def gla_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Weights of GLA and, without gk_proj, of retention."""
    count, key, value, group = sizes(c)
    norm = "g_norm_swish_gate" if c["fuse_norm"] else "g_norm"
    return {
        "q_proj.weight": (count * key, HIDDEN),
        "k_proj.weight": (count * key // group, HIDDEN),
        "v_proj.weight": (count * value // group, HIDDEN),
        "g_proj.weight": (count * value, HIDDEN),
        "o_proj.weight": (HIDDEN, count * value),
        **({f"{norm}.weight": (value,)} if c["elementwise_affine"] else {}),
        **({"gk_proj.0.weight": (16, HIDDEN)} if "clamp_min" in c else {}),
        **({"gk_proj.1.weight": (count * key // group, 16)} if "clamp_min" in c else {}),
        **({"gk_proj.1.bias": (count * key // group,)} if "clamp_min" in c else {}),
    }


def gla(w: Weights, p: str, c: dict[str, Any], x: np.ndarray, _: int) -> np.ndarray:
    """GatedLinearAttention, or MultiScaleRetention where there is no gk_proj."""
    count, key, value, group = sizes(c)
    q, k, v, gate = (x @ w[f"{p}{name}_proj.weight"].T for name in "qkvg")
    q, k, v = heads(q, key), heads(k, key, group), heads(v, value, group)
    if f"{p}gk_proj.0.weight" in w:
        gk = x @ w[f"{p}gk_proj.0.weight"].T @ w[f"{p}gk_proj.1.weight"].T + w[f"{p}gk_proj.1.bias"]
        g = heads(np.log(sigmoid(gk)) / 16, key, group)
    else:
        q, k = rotated(q), rotated(k)
        g = np.log(1 - 2.0 ** (-5 - np.arange(count)))[:, None]
    norm = w.get(f"{p}g_norm_swish_gate.weight", w.get(f"{p}g_norm.weight", 1.0))
    o = rms_norm(memory(q, k, v, g), norm, c["norm_eps"]) * silu(heads(gate, value))
    return o.reshape(*x.shape[:2], -1) @ w[f"{p}o_proj.weight"].T


def delta_sizes(c: dict[str, Any]) -> tuple[int, int, int, int]:
    """Key heads, value heads, width of a key and of a value."""
    if "head_dim" not in c:
        count, key, value, _ = sizes({**c, "num_kv_heads": None})
        return count, count, key, value
    keys = c["num_heads"]
    return keys, c["num_v_heads"] or keys, c["head_dim"], int(c["head_dim"] * c["expand_v"])


def delta_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Weights of DeltaNet, Gated DeltaNet and KDA."""
    keys, count, key, value = delta_sizes(c)
    kind, all_values = c["model_type"], count * value
    made: dict[str, tuple[int, ...]] = {"b_proj.weight": (count, HIDDEN)}
    for name, rows in (("q", keys * key), ("k", keys * key), ("v", all_values)):
        made[f"{name}_proj.weight"] = (rows, HIDDEN)
        made[f"{name}_conv1d.weight"] = (rows, 1, c["conv_size"])
    if kind == "kda":
        made |= {"f_proj.0.weight": (value, HIDDEN), "f_proj.1.weight": (count * key, value)}
        made |= {"g_proj.0.weight": (value, HIDDEN), "g_proj.1.weight": (all_values, value)}
        made |= {"g_proj.1.bias": (all_values,), "dt_bias": (count * key,), "A_log": (count,)}
    elif c["use_gate"]:
        made["g_proj.weight"] = (all_values, HIDDEN)
    if kind == "gated_deltanet":
        made |= {"a_proj.weight": (count, HIDDEN), "A_log": (count,), "dt_bias": (count,)}
    return made | {"o_norm.weight": (value,), "o_proj.weight": (HIDDEN, all_values)}


def delta(w: Weights, p: str, c: dict[str, Any], x: np.ndarray, _: int) -> np.ndarray:
    """DeltaNet, GatedDeltaNet and KimiDeltaAttention."""
    keys, count, key, value = delta_sizes(c)
    q, k, v = (conv(w, f"{p}{n}_conv1d", x @ w[f"{p}{n}_proj.weight"].T) for n in "qkv")
    q, k = (unit(heads(a, key, count // keys)) for a in (q, k))
    beta = sigmoid(x @ w[f"{p}b_proj.weight"].T) * (2 if c["allow_neg_eigval"] else 1)
    g: Any = 0.0
    if c["model_type"] == "gated_deltanet":
        step = np.log1p(np.exp(x @ w[f"{p}a_proj.weight"].T + w[f"{p}dt_bias"]))
        g = -(np.exp(w[f"{p}A_log"]) * step)[..., None]
    if c["model_type"] == "kda":
        f = x @ w[f"{p}f_proj.0.weight"].T @ w[f"{p}f_proj.1.weight"].T + w[f"{p}dt_bias"]
        f, a = heads(f, key), np.exp(w[f"{p}A_log"])[:, None]
        bound = c["lower_bound"]
        g = -a * np.log1p(np.exp(f)) if bound is None else bound * sigmoid(a * f)
    o = rms_norm(memory(q, k, heads(v, value), g, beta), w[f"{p}o_norm.weight"], c["norm_eps"])
    if c["model_type"] == "kda":
        gate = x @ w[f"{p}g_proj.0.weight"].T @ w[f"{p}g_proj.1.weight"].T + w[f"{p}g_proj.1.bias"]
        o = o * sigmoid(heads(gate, value))
    elif c["use_gate"]:
        o = o * silu(heads(x @ w[f"{p}g_proj.weight"].T, value))
    return o.reshape(*x.shape[:2], -1) @ w[f"{p}o_proj.weight"].T


def hgrn2_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Weights of HGRN2."""
    made = {f"{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qfio"}
    return made | ({"g_norm.weight": (HIDDEN,)} if c["elementwise_affine"] else {})


def hgrn2(w: Weights, p: str, c: dict[str, Any], x: np.ndarray, layer: int) -> np.ndarray:
    """HGRN2Attention, whose norm is called without the config's epsilon."""
    key = c["expand_ratio"] or HIDDEN // c["num_heads"]
    q, f, i = (x @ w[f"{p}{name}_proj.weight"].T for name in "qfi")
    forget = sigmoid(f)
    if c["use_lower_bound"] and layer:
        share = np.exp(w["model.lower_bounds"])
        share = share / share.sum(0)
        bound = (share.cumsum(0) - share[0])[layer]
        forget = bound + (1 - bound) * forget
    value = HIDDEN // (HIDDEN // key)
    o = memory(
        heads(silu(q), key), heads(1 - forget, key), heads(i, value), heads(np.log(forget), key)
    )
    o = rms_norm(o.reshape(*x.shape[:2], -1), w.get(f"{p}g_norm.weight", 1.0), 1e-5)
    return o @ w[f"{p}o_proj.weight"].T


def linear_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Weights of linear attention."""
    count, key, value, group = sizes(c)
    made: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (count * key, HIDDEN),
        "k_proj.weight": (count * key // group, HIDDEN),
        "v_proj.weight": (count * value // group, HIDDEN),
        "o_proj.weight": (HIDDEN, count * value),
        **({"norm.weight": (value,)} if c["elementwise_affine"] else {}),
    }
    for part in "k" if c["tie_feature_map_qk"] else "qk":
        if c["feature_map"] == "elementwise_product":
            for i in (1, 2):
                made[f"feature_map_{part}.layer{i}.weight"] = (key, key)
                made[f"feature_map_{part}.layer{i}.bias"] = (key,)
        if c["feature_map"] == "t2r":
            made[f"feature_map_{part}.layer.weight"] = (key, key)
    return made


def linear(w: Weights, p: str, c: dict[str, Any], x: np.ndarray, _: int) -> np.ndarray:
    """LinearAttention with its output norm."""
    _, key, value, group = sizes(c)
    q, k, v = (x @ w[f"{p}{name}_proj.weight"].T for name in "qkv")

    def mapped(y: np.ndarray, part: str) -> np.ndarray:
        own = f"{p}feature_map_{'k' if c['tie_feature_map_qk'] else part}."
        if c["feature_map"] == "elementwise_product":
            first, second = (
                y @ w[f"{own}layer{i}.weight"].T + w[f"{own}layer{i}.bias"] for i in (1, 2)
            )
            return first * second
        if c["feature_map"] == "t2r":
            y = y @ w[f"{own}layer.weight"].T
        if c["feature_map"] == "elu":
            return np.where(y > 0, y + 1, np.exp(np.minimum(y, 0)))
        return y if c["feature_map"] == "identity" else np.maximum(y, 0)

    q, k = mapped(heads(q, key), "q"), mapped(heads(k, key, group), "k")
    o = memory(q, k, heads(v, value, group), 0.0)
    o = rms_norm(o, w.get(f"{p}norm.weight", 1.0), c["norm_eps"])
    return o.reshape(*x.shape[:2], -1) @ w[f"{p}o_proj.weight"].T


def attention(w: Weights, p: str, spec: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """fla's Attention in a hybrid."""
    count = spec["num_heads"]
    group = count // spec.get("num_kv_heads", count)
    q, k, v = (x @ w[f"{p}{n}_proj.weight"].T + w.get(f"{p}{n}_proj.bias", 0) for n in "qkv")
    width, time = HIDDEN // count, np.arange(x.shape[1])
    theta = spec.get("rope_theta", 10000.0)
    q, k, v = (
        rotated(heads(q, width), theta),
        rotated(heads(k, width, group), theta),
        heads(v, width, group),
    )
    scores = np.einsum("bthd,bshd->bhts", q, k) * width**-0.5
    age = time[:, None] - time
    seen = (age >= 0) & (age < (spec.get("window_size") or len(time)))
    scores = np.where(seen, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    o = np.einsum("bhts,bshd->bthd", scores / scores.sum(-1, keepdims=True), v)
    return o.reshape(*x.shape[:2], -1) @ w[f"{p}o_proj.weight"].T


def attention_shapes(spec: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Weights of such a layer."""
    rows = HIDDEN * spec.get("num_kv_heads", spec["num_heads"]) // spec["num_heads"]
    made: dict[str, tuple[int, ...]] = {"o_proj.weight": (HIDDEN, HIDDEN)}
    for name, out in (("q", HIDDEN), ("k", rows), ("v", rows)):
        made[f"{name}_proj.weight"] = (out, HIDDEN)
        if spec.get("qkv_bias"):
            made[f"{name}_proj.bias"] = (out,)
    return made


MIXERS: dict[str, Any] = {
    "gla": (gla_shapes, gla), "retnet": (gla_shapes, gla), "delta_net": (delta_shapes, delta),
    "gated_deltanet": (delta_shapes, delta), "kda": (delta_shapes, delta),
    "hgrn2": (hgrn2_shapes, hgrn2), "linear_attn": (linear_shapes, linear),
}  # fmt: skip


def model(kind: str, **changes: Any) -> Published:
    """A random model of this type; ``changes`` to its config."""
    config = {"model_type": kind, **COMMON, **CONFIGS[kind], **changes}
    given = config["attn"] or []
    specs = given if isinstance(given, list) else [given]
    others = {i: spec for spec in specs for i in spec["layers"]}
    own_shapes, mixer = MIXERS[kind]
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (oracle.VOCABULARY, HIDDEN)}
    if kind == "hgrn2" and config["use_lower_bound"]:
        shapes["model.lower_bounds"] = (LAYERS, HIDDEN)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        inner = attention_shapes(others[i]) if i in others else own_shapes(config)
        shapes |= {f"{p}attn.{name}": shape for name, shape in inner.items()}
        shapes |= {f"{p}attn_norm.weight": (HIDDEN,), f"{p}mlp_norm.weight": (HIDDEN,)}
        shapes |= {f"{p}mlp.{name}_proj.weight": (WIDTH, HIDDEN) for name in ("gate", "up")}
        shapes[f"{p}mlp.down_proj.weight"] = (HIDDEN, WIDTH)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (oracle.VOCABULARY, HIDDEN)

    def logits(w: Weights, tokens: np.ndarray) -> np.ndarray:
        x, eps = w["model.embeddings.weight"][tokens], config["norm_eps"]
        for i in range(LAYERS):
            p = f"model.layers.{i}."
            y = rms_norm(x, w[f"{p}attn_norm.weight"], eps)
            if i in others:
                x = x + attention(w, f"{p}attn.", others[i], y)
            else:
                x = x + mixer(w, f"{p}attn.", config, y, i)
            y = rms_norm(x, w[f"{p}mlp_norm.weight"], eps)
            gate, up = (y @ w[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (silu(gate) * up) @ w[f"{p}mlp.down_proj.weight"].T
        head = w.get("lm_head.weight", w["model.embeddings.weight"])
        return rms_norm(x, w["model.norm.weight"], eps) @ head.T

    return Published(drawn(shapes, CENTRES), config, logits)
