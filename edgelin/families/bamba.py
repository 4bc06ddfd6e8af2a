"""Bamba (``bamba``: Bamba-9B): Mamba-2 with a few layers of attention that rotate half a head.

Every layer is a mixer and a gated MLP. ``attn_layer_indices`` says where attention is.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from edgelin.families.common import (
    attention,
    attention_table,
    gated_mlp,
    head,
    mamba2,
    mamba2_table,
    rope,
)
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("bamba",)


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    hidden = fields.take("hidden_size")
    fields.expect("hidden_act", "silu", "swish")
    fields.ignore("z_loss_coefficient")  # of the training
    full = fields.take("attn_layer_indices", [])
    kinds = ["attention" if i in full else "mamba" for i in range(fields.take("num_hidden_layers"))]
    heads = attention_table(fields)
    tables = {
        "mamba": mamba2_table(fields, fields.take("mamba_expand", 2) * hidden),
        "attention": heads | rope(fields, heads["head_dim"], partial=0.5),
    }
    fields.expect("attn_rotary_emb", tables["attention"]["rotary_dim"])
    fields.expect("mlp_bias", False)
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=fields.take("intermediate_size"),
        layers=tuple(kinds),
        mixers={name: table for name, table in tables.items() if name in kinds},
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=fields.take("rms_norm_eps"),
    )
    return config, lambda tensors: _weights(tensors, config)


def _weights(tensors: Tensors, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    yield "embedding.weight", tensors("model.embed_tokens.weight")
    for i, kind in enumerate(config.layers):
        theirs, ours, table = f"model.layers.{i}.", f"blocks.{i}.", config.mixers[kind]
        yield f"{ours}mixer_norm.weight", tensors(f"{theirs}input_layernorm.weight")
        if kind == "mamba":
            mixer = mamba2(tensors, f"{theirs}mamba.", table)
        else:
            mixer = attention(tensors, f"{theirs}self_attn.", table)
        for name, tensor in mixer:
            yield f"{ours}mixer.{name}", tensor
        yield f"{ours}mlp_norm.weight", tensors(f"{theirs}pre_ff_layernorm.weight")
        for name, tensor in gated_mlp(tensors, f"{theirs}feed_forward."):
            yield f"{ours}mlp.{name}", tensor
    yield "norm.weight", tensors("model.final_layernorm.weight")
    yield from head(tensors, config.tie_word_embeddings)
