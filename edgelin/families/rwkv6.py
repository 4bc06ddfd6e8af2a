"""RWKV-6 ("Finch"): fla's layout (``rwkv6``) and the authors' ``.pth`` files (RWKV-x060).

The authors order the five mixtures of a token w, k, v, r, g, as we do; fla has r first. The norm of
heads has the epsilon of the other norms in fla's code, 64e-5 in the authors'; we divide by sqrt(K)
before it, which makes it K times smaller.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from edgelin.families import fla_common as fla
from edgelin.families import rwkv_common as rwkv
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("rwkv6",)
CHECKED = """
    logits beside a float64 model written from RWKV-LM, in both layouts; fla 0.6.0's own class gives
    the same to 3e-6 for 12 tokens (Triton's interpreter)
"""
_ORDER = [1, 2, 3, 0, 4]  # where fla has w, k, v, r and g
_NORM = {"norm.weight": "ln_x.weight", "norm.bias": "ln_x.bias"}
_PROJECTIONS = {"r": "receptance", "k": "key", "v": "value", "gate": "gate", "out": "output"}


def describe(tensors: Tensors) -> dict[str, Any] | None:
    """The config of a ``.pth`` file of RWKV-6; None: it is of something else."""
    if not (tensors.has("emb.weight") and tensors.has("blocks.0.att.time_maa_w2")):
        return None
    own = "blocks.0.att."
    return rwkv.describe(tensors) | {
        "model_type": "rwkv6",
        "num_heads": tensors(f"{own}time_faaaa").shape[0],
        "expand_k": 1.0,
        "proj_low_rank_dim": tensors(f"{own}time_maa_w2").shape[1],
        "gate_low_rank_dim": tensors(f"{own}time_decay_w1").shape[1],
    }


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    hidden, count = fields.take("hidden_size"), fields.take("num_hidden_layers")
    heads = fields.take("num_heads", 4)
    key_dim = round(hidden * fields.take("expand_k", 0.5)) // heads
    eps = fields.take("group_norm_eps", fields.take("norm_eps", 1e-5))
    table = {
        "type": "rwkv6",
        "num_heads": heads,
        "key_dim": key_dim,
        "value_dim": round(hidden * fields.take("expand_v", 1.0)) // heads,
        "mix_rank": fields.take("proj_low_rank_dim", 32),
        "decay_rank": fields.take("gate_low_rank_dim", 64),
        "norm_eps": eps / key_dim,
    }
    others = fla.attention_tables(fields, hidden, count)
    layers, mixers = fla.layers_of([others.get(i, table) for i in range(count)])
    fields.ignore("fuse_norm")
    mixers["ffn"] = {"receptance": True}
    config = rwkv.stream(fields, mixers, layers, ratio=3.5)

    def mixer(tensors: Tensors, prefix: str, layer: int) -> rwkv.Parameters:
        if layer in others:
            return fla.attention(tensors, prefix, others[layer])
        kind = _original if rwkv.is_original(tensors) else _fla
        return kind(tensors, prefix, table)

    bias = fields.take("norm_bias", True)
    return config, lambda tensors: rwkv.weights(tensors, config, mixer, _channel_mix, bias=bias)


def _original(tensors: Tensors, prefix: str, _: dict[str, Any]) -> rwkv.Parameters:
    """Parameters of a time mixing of the authors."""
    yield "mix_base", tensors(f"{prefix}time_maa_x").flatten()
    yield "mix_in_proj.weight", tensors(f"{prefix}time_maa_w1").T
    yield "mix_out", tensors(f"{prefix}time_maa_w2")
    yield "mix_bias", rwkv.rows(tensors, prefix, *(f"time_maa_{part}" for part in "wkvrg"))
    yield "decay_in_proj.weight", tensors(f"{prefix}time_decay_w1").T
    yield "decay_out_proj.weight", tensors(f"{prefix}time_decay_w2").T
    yield "decay_out_proj.bias", tensors(f"{prefix}time_decay").flatten()
    yield "bonus", tensors(f"{prefix}time_faaaa")
    names = {f"{ours}_proj.weight": f"{name}.weight" for ours, name in _PROJECTIONS.items()}
    yield from rwkv.renamed(tensors, prefix, names | _NORM)


def _fla(tensors: Tensors, prefix: str, table: dict[str, Any]) -> rwkv.Parameters:
    """Parameters of a time mixing of fla."""

    def five(tensor: Tensor) -> Tensor:
        """Rows of all five mixtures as `[5, ..., columns]` in our order."""
        rows: Tensor = tensor.unflatten(0, (5, -1))[_ORDER]
        return rows

    yield "mix_base", tensors(f"{prefix}x_proj.0.mu")
    yield "mix_in_proj.weight", five(tensors(f"{prefix}x_proj.0.linear.weight")).flatten(0, 1)
    yield "mix_out", five(tensors(f"{prefix}x_proj.2.weight").T)
    yield "mix_bias", five(tensors(f"{prefix}x_bias")).flatten(0, 1)
    names = {
        "decay_in_proj.weight": "w_proj.linear.lora.0.weight",
        "decay_out_proj.weight": "w_proj.linear.lora.2.weight",
        "decay_out_proj.bias": "w_proj.linear.lora.2.bias",
        "bonus": "bonus",
        "gate_proj.weight": "g_proj.linear.weight",
        "norm.weight": "g_norm.weight",
        "norm.bias": "g_norm.bias",
        "out_proj.weight": "o_proj.weight",
    }
    names |= {f"{part}_proj.weight": f"{part}_proj.linear.weight" for part in "rkv"}
    yield from rwkv.renamed(tensors, prefix, names)


def _channel_mix(tensors: Tensors, prefix: str) -> rwkv.Parameters:
    """Parameters of a channel mixing."""
    if rwkv.is_original(tensors):
        yield "mix", rwkv.rows(tensors, prefix, "time_maa_k", "time_maa_r")
        key, gate = "key.weight", "receptance.weight"
    else:
        yield "mix", rwkv.rows(tensors, prefix, "key.mu", "receptance.mu")
        key, gate = "key.linear.weight", "receptance.linear.weight"
    names = {"up_proj.weight": key, "down_proj.weight": "value.weight", "gate_proj.weight": gate}
    yield from rwkv.renamed(tensors, prefix, names)
