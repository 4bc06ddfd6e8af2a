"""Granite 4.0 (``granitemoehybrid``): Mamba-2 with a few layers of attention, or attention alone.

Every layer is a mixer and a gated MLP. Four factors are folded into weights: that of the embedding,
``residual_multiplier`` on what every branch adds, ``attention_multiplier`` in the place of
1 / sqrt(head_dim), and ``logits_scaling``, a divisor. The H models know no positions (``nope``),
the others rotate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from edgelin.families.common import (
    attention,
    attention_table,
    head,
    layer_types,
    mamba2,
    mamba2_table,
    rope,
    scaled,
)
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("granitemoehybrid",)
_WORDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}


@dataclass(frozen=True)
class _Factors:
    """What scales the stream."""

    embedding: float
    residual: float
    query: float
    logits: float


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    hidden, tied = fields.take("hidden_size"), fields.take("tie_word_embeddings", False)
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("normalization_function", "rmsnorm")
    fields.expect("num_local_experts", 0)
    fields.ignore(  # of experts, and of initial values
        "intermediate_size", "num_experts_per_tok", "router_aux_loss_coef", "init_method",
    )  # fmt: skip
    kinds = layer_types(fields, _WORDS, ["mamba"] * fields.take("num_hidden_layers"))
    tables = {"mamba": mamba2_table(fields, fields.take("mamba_expand", 2) * hidden)}
    tables["attention"] = attention_table(fields)
    rotation = rope(fields, tables["attention"]["head_dim"])
    fields.expect("position_embedding_type", "nope", "rope")
    if fields.take("position_embedding_type", "nope") == "nope":
        rotation = {"rotary_dim": 0}
    tables["attention"] |= rotation
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=fields.take("shared_intermediate_size"),
        layers=tuple(kinds),
        mixers={name: table for name, table in tables.items() if name in kinds},
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=tied,
        rms_norm_eps=fields.take("rms_norm_eps"),
    )
    embedding = fields.take("embedding_multiplier", 1.0)
    factors = _Factors(
        embedding=embedding,
        residual=fields.take("residual_multiplier", 1.0),
        query=fields.take("attention_multiplier", 1.0) * tables["attention"]["head_dim"] ** 0.5,
        # A tied head has the factor of the embedding in its weight.
        logits=1 / fields.take("logits_scaling", 1.0) / (embedding if tied else 1.0),
    )
    return config, lambda tensors: _weights(tensors, config, factors)


def _weights(
    tensors: Tensors, config: ModelConfig, factors: _Factors
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    yield "embedding.weight", scaled(tensors("model.embed_tokens.weight"), factors.embedding)
    for i, kind in enumerate(config.layers):
        theirs, ours, table = f"model.layers.{i}.", f"blocks.{i}.", config.mixers[kind]
        yield f"{ours}mixer_norm.weight", tensors(f"{theirs}input_layernorm.weight")
        if kind == "mamba":
            mixer = mamba2(tensors, f"{theirs}mamba.", table, outputs=factors.residual)
        else:
            mixer = attention(
                tensors,
                f"{theirs}self_attn.",
                table,
                queries=factors.query,
                outputs=factors.residual,
            )
        for name, tensor in mixer:
            yield f"{ours}mixer.{name}", tensor
        yield f"{ours}mlp_norm.weight", tensors(f"{theirs}post_attention_layernorm.weight")
        mlp = f"{theirs}shared_mlp."
        yield f"{ours}mlp.gate_up_proj.weight", tensors(f"{mlp}input_linear.weight")
        down = scaled(tensors(f"{mlp}output_linear.weight"), factors.residual)
        yield f"{ours}mlp.down_proj.weight", down
    yield "norm.weight", scaled(tensors("model.norm.weight"), factors.logits)
    yield from head(tensors, config.tie_word_embeddings)
