"""Granite 4.0 (``granitemoehybrid``): Mamba-2 with a few layers of attention, or attention alone.

Every layer is a mixer and a gated MLP, with experts beside it in the larger models (H-Tiny,
H-Small): ``intermediate_size`` is theirs, the MLP's is ``shared_intermediate_size``. Four factors
are folded into weights: that of the embedding, ``residual_multiplier`` on what every branch adds,
``attention_multiplier`` in the place of 1 / sqrt(head_dim), and ``logits_scaling``, a divisor. The
H models know no positions (``nope``), the others rotate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgelin.families.common import (
    attention,
    attention_table,
    experts,
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
    fields.ignore("router_aux_loss_coef", "init_method")  # of training, and of initial values
    kinds = layer_types(fields, _WORDS, ["mamba"] * fields.take("num_hidden_layers"))
    tables = {"mamba": mamba2_table(fields, fields.take("mamba_expand", 2) * hidden)}
    tables["attention"] = attention_table(fields)
    rotation = rope(fields, tables["attention"]["head_dim"])
    fields.expect("position_embedding_type", "nope", "rope")
    if fields.take("position_embedding_type", "nope") == "nope":
        rotation = {"rotary_dim": 0}
    tables["attention"] |= rotation
    expert = _experts(fields)
    count, width = expert["num_experts"], expert["shared_size"]
    if count:
        tables["moe"] = expert
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=0 if count else width,
        layers=tuple(kinds),
        mixers={name: table for name, table in tables.items() if name in (*kinds, "moe")},
        mlps=("moe",) * len(kinds) if count else (),
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


def _experts(fields: Fields) -> dict[str, Any]:
    """The table of the experts, which has none in the smaller models, and of the MLP."""
    return {
        "type": "moe",
        "num_experts": fields.take("num_local_experts", 8),
        "experts_per_token": fields.take("num_experts_per_tok", 2),
        "intermediate_size": fields.take("intermediate_size", 0),
        "shared_size": fields.take("shared_intermediate_size"),
    }


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
        for name, tensor in _mlp(tensors, theirs, config, factors):
            yield f"{ours}mlp.{name}", tensor
    yield "norm.weight", scaled(tensors("model.norm.weight"), factors.logits)
    yield from head(tensors, config.tie_word_embeddings)


def _mlp(
    tensors: Tensors, layer: str, config: ModelConfig, factors: _Factors
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the MLP and of the experts, if any."""
    theirs, ours = f"{layer}shared_mlp.", ""
    if config.mlps:
        own, ours = f"{layer}block_sparse_moe.", "shared."
        yield "router.weight", tensors(f"{own}router.layer.weight")
        count, names = config.mixers["moe"]["num_experts"], ("input_linear", "output_linear")
        together = [f"{name}.weight" for name in names]
        for name, tensor in experts(tensors, own, count, together=together):
            factor = factors.residual if name == "down_proj" else 1.0
            yield f"experts.{name}", scaled(tensor, factor)
    yield f"{ours}gate_up_proj.weight", tensors(f"{theirs}input_linear.weight")
    down = scaled(tensors(f"{theirs}output_linear.weight"), factors.residual)
    yield f"{ours}down_proj.weight", down
