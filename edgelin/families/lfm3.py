"""LFM3 (``lfm3``: 1.7B): short convolutions, a window of attention and full attention, in turn.

As LFM2 (:mod:`edgelin.families.lfm2`), with longer convolutions, a second norm behind every branch
(``use_sandwich_norm``) and a gate a head (``use_attention_gate``). Both kinds of attention have a
rotation of their own. A "proportional" one turns the pairs (i, i + D/2) of the first i only; we
rotate leading dimensions, so that the channels of a head change places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from edgelin.families.common import head, layer_types, stacked
from edgelin.families.lfm2 import convolution, mlp
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("lfm3",)
_WORDS = {"conv": "conv", "sliding_attention": "sliding", "full_attention": "full"}
_ROTATIONS: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
}


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    kinds = [
        "full" if i % 4 == 2 else "sliding" if i % 4 == 0 and i else "conv"
        for i in range(fields.take("num_hidden_layers"))
    ]
    layers = tuple(layer_types(fields, _WORDS, kinds))
    conv = {
        "type": "short_conv",
        "conv_size": fields.take("conv_L_cache", 7),
        "bias": fields.take("conv_bias", False),
    }
    sandwich = fields.take("use_sandwich_norm", True)
    config = ModelConfig(
        hidden_size=fields.take("hidden_size"),
        intermediate_size=fields.take("intermediate_size"),
        layers=layers,
        mixers={"conv": conv, **_attention(fields)},
        vocab_size=fields.take("vocab_size"),
        norm_places=("both",) * len(layers) if sandwich else (),
        tie_word_embeddings=fields.take("tie_word_embeddings", True),
        rms_norm_eps=fields.first("norm_eps", "rms_norm_eps", default=1e-5),
    )
    return config, lambda tensors: _weights(tensors, config)


def _attention(fields: Fields) -> dict[str, dict[str, Any]]:
    """The tables of both kinds of attention."""
    head_dim, bias = fields.take("head_dim", 128), fields.take("attention_bias", False)
    table = {
        "type": "attention",
        "num_heads": fields.take("num_attention_heads"),
        "num_kv_heads": fields.take("num_key_value_heads"),
        "head_dim": head_dim,
        "qk_norm": True,
        "head_gate": fields.take("use_attention_gate", True),
        "bias": bias,
        "out_bias": bias,
    }
    where = f"{fields.where}: rope_parameters"
    rotations = Fields(fields.take("rope_parameters", _ROTATIONS), where)
    sliding = _rotation(rotations.nested("sliding_attention"), head_dim)
    full = _rotation(rotations.nested("full_attention"), head_dim)
    rotations.finish()
    return {
        "sliding": {**table, **sliding, "window": fields.take("sliding_window", 256)},
        "full": {**table, **full, "window": 0},
    }


def _rotation(fields: Fields, head_dim: int) -> dict[str, Any]:
    """Rotation as options of our attention."""
    fields.expect("rope_type", "default", "proportional")
    theta, rotated = float(fields.take("rope_theta", 1e6)), head_dim
    if fields.take("rope_type", "default") == "proportional":
        fields.expect("factor", 1.0)
        rotated = 2 * int(fields.take("partial_rotary_factor", 1.0) * head_dim // 2)
        theta = theta ** (rotated / head_dim)  # theirs is theta^(-2i/D), ours theta^(-2i/R)
    fields.ignore("partial_rotary_factor")  # a default rotation turns all
    fields.finish()
    return {"rope_theta": theta, "rotary_dim": rotated}


def _weights(tensors: Tensors, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    yield "embedding.weight", tensors("model.embed_tokens.weight")
    for i, kind in enumerate(config.layers):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        for branch, name in (("mixer", "operator"), ("mlp", "ffn")):
            yield f"{ours}{branch}_norm.weight", tensors(f"{theirs}{name}_norm.weight")
            if config.norm_places:
                norm = tensors(f"{theirs}post_{name}_norm.weight")
                yield f"{ours}{branch}_post_norm.weight", norm
        table = config.mixers[kind]
        parts = convolution if kind == "conv" else _attention_weights
        for name, tensor in parts(tensors, theirs, table):
            yield f"{ours}mixer.{name}", tensor
        for name, tensor in mlp(tensors, theirs):
            yield f"{ours}mlp.{name}", tensor
    yield "norm.weight", tensors("model.embedding_norm.weight")
    yield from head(tensors, config.tie_word_embeddings)


def _attention_weights(
    tensors: Tensors, layer: str, table: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of attention."""
    own, places = f"{layer}self_attn.", _places(table["head_dim"], table["rotary_dim"])
    for part in ("weight", "bias") if table["bias"] else ("weight",):
        turning = stacked(tensors, f"{own}q_proj.{part}", f"{own}k_proj.{part}")
        turning = turning.unflatten(0, (-1, len(places)))[:, places].flatten(0, 1)
        yield f"qkv_proj.{part}", torch.cat([turning, tensors(f"{own}v_proj.{part}")])
        yield f"out_proj.{part}", tensors(f"{own}o_proj.{part}")
    for name in ("q_norm", "k_norm"):
        yield f"{name}.weight", tensors(f"{own}{name}.weight")[places]
    if table["head_gate"]:
        yield "gate_proj.weight", tensors(f"{own}gate_proj.weight")


def _places(head_dim: int, rotated: int) -> Tensor:
    """Channels of a head in our order: those that are rotated, then the others."""
    halves = torch.arange(head_dim).view(2, -1)
    return torch.cat([halves[:, : rotated // 2].flatten(), halves[:, rotated // 2 :].flatten()])
