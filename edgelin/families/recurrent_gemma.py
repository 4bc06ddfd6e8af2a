"""RecurrentGemma (``recurrent_gemma``: 2B and 9B): Griffin, one layer in three is attention.

Every layer is a mixer and a gated MLP of half the width in the config, both with biases; norms
multiply by 1 + weight, logits are capped. The embedding times sqrt(hidden_size), which the
published code rounds to bfloat16, is stored here; where the head is tied to it, the last norm takes
the factor out again. A bundle needs a window (``attention_window_size``) of 64 or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.common import head, rope, stacked
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("recurrent_gemma",)


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    fields.expect("hidden_activation", "gelu_pytorch_tanh")
    fields.expect("embeddings_scale_by_sqrt_dim", True)
    fields.ignore("w_init_variance_scale", "final_w_init_variance_scale")
    hidden, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    layers = _layers(fields)
    recurrent = {
        "type": "rg_lru",
        "inner_size": fields.take("lru_width", hidden),
        "num_blocks": heads,
        "conv_size": fields.take("conv1d_width", 4),
        "bias": True,
        "unit_first": True,
    }
    head_dim = fields.take("head_dim", hidden // heads)
    attention = {
        "type": "attention",
        "num_heads": heads,
        "num_kv_heads": fields.take("num_key_value_heads", heads),
        "head_dim": head_dim,
        "window": fields.take("attention_window_size", 2048),
        "bias": fields.take("attention_bias", False),
        "out_bias": True,
        **rope(fields, head_dim, partial=0.5),
    }
    mlp = {
        "type": "mlp",
        "intermediate_size": fields.take("intermediate_size") // 2,
        "activation": "gelu_tanh",
        "bias": True,
    }
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=0,
        layers=layers,
        mlps=("mlp",) * len(layers),
        mixers={"recurrent": recurrent, "attention": attention, "mlp": mlp},
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", True),
        rms_norm_eps=fields.take("rms_norm_eps", 1e-6),
        logit_softcap=float(fields.take("logits_soft_cap", 30.0)),
    )
    return config, lambda tensors: _weights(tensors, config)


def _layers(fields: Fields) -> tuple[str, ...]:
    """The mixer of every layer: a pattern, repeated."""
    pattern = fields.first(
        "block_types", "_block_types", default=["recurrent", "recurrent", "attention"]
    )
    for word in pattern:
        if word not in ("recurrent", "attention"):
            raise EdgelinError(
                f"{fields.where}: block_types has {word!r}; supported: 'recurrent', 'attention'"
            )
    count = fields.take("num_hidden_layers")
    return tuple((list(pattern) * count)[:count])


def _weights(tensors: Tensors, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    factor = float(torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16))
    yield "embedding.weight", tensors.full("model.embed_tokens.weight") * factor
    for i, kind in enumerate(config.layers):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        yield f"{ours}mixer_norm.weight", 1 + tensors.full(f"{theirs}temporal_pre_norm.weight")
        parts = _recurrent if kind == "recurrent" else _attention
        for name, tensor in parts(tensors, f"{theirs}temporal_block.", config.mixers[kind]):
            yield f"{ours}mixer.{name}", tensor
        yield f"{ours}mlp_norm.weight", 1 + tensors.full(f"{theirs}channel_pre_norm.weight")
        own = f"{theirs}mlp_block."
        for part in ("weight", "bias"):
            rows = stacked(tensors, f"{own}gate_proj.{part}", f"{own}up_proj.{part}")
            yield f"{ours}mlp.gate_up_proj.{part}", rows
            yield f"{ours}mlp.down_proj.{part}", tensors(f"{own}down_proj.{part}")
    last = 1 + tensors.full("model.final_norm.weight")
    yield "norm.weight", last / factor if config.tie_word_embeddings else last
    yield from head(tensors, config.tie_word_embeddings)


def _recurrent(tensors: Tensors, own: str, table: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a recurrent layer; its gates are r, then i."""
    for part in ("weight", "bias"):
        rows = stacked(tensors, f"{own}linear_x.{part}", f"{own}linear_y.{part}")
        yield f"in_gate_proj.{part}", rows
        yield f"out_proj.{part}", tensors(f"{own}linear_out.{part}")
    yield "conv_weight", tensors(f"{own}conv_1d.weight")[:, 0]
    yield "conv_bias", tensors(f"{own}conv_1d.bias")
    gates = [f"{own}rg_lru.{name}_gate" for name in ("recurrent", "input")]
    yield "decay_weight", torch.stack([tensors(f"{gate}_weight") for gate in gates])
    yield "decay_bias", stacked(tensors, *(f"{gate}_bias" for gate in gates)).flatten()
    yield "Lambda", tensors(f"{own}rg_lru.recurrent_param")


def _attention(tensors: Tensors, own: str, table: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of an attention layer."""
    for part in ("weight", "bias") if table["bias"] else ("weight",):
        yield f"qkv_proj.{part}", stacked(tensors, *(f"{own}{n}_proj.{part}" for n in "qkv"))
    for part in ("weight", "bias"):
        yield f"out_proj.{part}", tensors(f"{own}o_proj.{part}")
