"""RWKV-7 ("Goose"): fla's layout (``rwkv7``) and the authors' ``.pth`` files (RWKV-x070, G1).

A ``.pth`` file has no config: the shapes say everything. Three things surprise: fla's configs carry
a ``num_heads`` that means nothing when there is a ``head_dim``; the epsilon of the norm of heads is
``head_dim`` times that of the others; and fla's fused code adds 1e-6 where it normalises kk. The
layer that others take values from is the first one, whose own share (v0, v1, v2 in a ``.pth`` file)
is stored and never used.
"""

from __future__ import annotations

from typing import Any

from edgelin.families import rwkv_common as rwkv
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("rwkv7",)
CHECKED = """
    logits beside a float64 model written from RWKV-LM, in both layouts; fla 0.6.0's own class gives
    the same to 2e-6 for 12 tokens (Triton's interpreter)
"""
_RANKS = {"decay": "w", "beta": "a", "gate": "g", "value_beta": "v"}
_PROJECTIONS = {
    "r_proj.weight": ("r_proj.weight", "receptance.weight"),
    "k_proj.weight": ("k_proj.weight", "key.weight"),
    "v_proj.weight": ("v_proj.weight", "value.weight"),
    "out_proj.weight": ("o_proj.weight", "output.weight"),
    "norm.weight": ("g_norm.weight", "ln_x.weight"),
    "norm.bias": ("g_norm.bias", "ln_x.bias"),
    "r_k": ("r_k", "r_k"),
}


def describe(tensors: Tensors) -> dict[str, Any] | None:
    """The config of a ``.pth`` file of RWKV-7; None: it is of something else."""
    if not (tensors.has("emb.weight") and tensors.has("blocks.0.att.r_k")):
        return None
    ranks = {"decay": "w1", "a": "a1", "gate": "g1"}
    values = rwkv.describe(tensors) | {
        f"{name}_low_rank_dim": tensors(f"blocks.0.att.{tensor}").shape[1]
        for name, tensor in ranks.items()
    }
    if values["num_hidden_layers"] > 1:
        values["v_low_rank_dim"] = tensors("blocks.1.att.v1").shape[1]
    head_dim = tensors("blocks.0.att.r_k").shape[1]
    return values | {"model_type": "rwkv7", "head_dim": head_dim, "fuse_norm": False}


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    hidden, count = fields.take("hidden_size"), fields.take("num_hidden_layers")
    fields.expect("attn")  # fla's own class cannot run with other layers among these
    heads = fields.take("num_heads", None)
    head_dim = fields.take("head_dim", hidden // heads if heads else 64)
    widths = fields.take("value_dim", hidden)
    widths = widths if isinstance(widths, list) else [widths] * count
    if set(widths) != {widths[0]}:
        fields.expect("value_dim", [widths[0]] * count)
    heads = hidden // head_dim
    eps = fields.take("norm_eps", 1e-5)
    table = {
        "type": "rwkv7",
        "num_heads": heads,
        "key_dim": head_dim,
        "value_dim": widths[0] // heads,
        "decay_rank": fields.take("decay_low_rank_dim", 64),
        "beta_rank": fields.take("a_low_rank_dim", 64),
        "gate_rank": fields.take("gate_low_rank_dim", 128),
        "value_rank": fields.take("v_low_rank_dim", 16),
        "norm_eps": fields.take("group_norm_eps", head_dim * eps),
        "key_norm_eps": 1e-6 if fields.take("fuse_norm", True) else 1e-12,
    }
    config = rwkv.stream(fields, {"rwkv7": table, "ffn": {}}, ("rwkv7",) * count, ratio=4)
    bias = fields.take("norm_bias", True)
    return config, lambda tensors: rwkv.weights(tensors, config, _mixer, _channel_mix, bias=bias)


def _mixer(tensors: Tensors, prefix: str, layer: int) -> rwkv.Parameters:
    """Parameters of a time mixing."""
    original = rwkv.is_original(tensors)
    if tensors.has(f"{prefix}x_x"):  # fla's first version
        yield "mix", tensors(f"{prefix}x_x").reshape(6, -1)
    else:
        yield "mix", rwkv.rows(tensors, prefix, *(f"x_{part}" for part in "rwkvag"))
    for name in ("k_k", "k_a"):
        yield name, tensors(f"{prefix}{name}").flatten()
    names = {ours: theirs[original] for ours, theirs in _PROJECTIONS.items()}
    yield from rwkv.renamed(tensors, prefix, names)
    for ours, letter in _RANKS.items():
        if ours == "value_beta" and layer == 0:
            for name in (f"{prefix}v{i}" for i in range(3)):
                tensors.ignore(name)
            continue
        own = f"{prefix}{letter}_lora.lora."
        if original:
            inner, outer = (tensors(f"{prefix}{letter}{i}").T for i in (1, 2))
        else:
            inner, outer = tensors(f"{own}0.weight"), tensors(f"{own}2.weight")
        yield f"{ours}_in_proj.weight", inner
        yield f"{ours}_out_proj.weight", outer
        if ours != "gate":
            bias = tensors(f"{prefix}{letter}0" if original else f"{own}2.bias")
            yield f"{ours}_out_proj.bias", bias.flatten()


def _channel_mix(tensors: Tensors, prefix: str) -> rwkv.Parameters:
    """Parameters of a channel mixing."""
    yield "mix", rwkv.rows(tensors, prefix, "x_k")
    names = {"up_proj.weight": "key.weight", "down_proj.weight": "value.weight"}
    yield from rwkv.renamed(tensors, prefix, names)
