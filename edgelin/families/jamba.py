"""Jamba (``jamba``: Jamba-Reasoning-3B, Jamba2-3B, and Mini with experts): Mamba, some attention.

Every layer is a mixer and a gated MLP, or experts of the same width in every other layer of the
larger models (``expert_layer_period``). The Mamba layers have norms on the step, B and C; attention
knows no positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from edgelin.families.common import experts, gated_mlp, head, mamba, sparse_layers, stacked
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("jamba",)


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("mamba_inner_layernorms", True)
    fields.ignore(  # forms of the computation, and what only training reads
        "use_mamba_kernels", "use_mambapy", "use_associative_scan", "router_aux_loss_coef",
        "calc_logits_for_entire_prompt", "n_ctx",
    )  # fmt: skip
    kinds = _kinds(fields)
    width, mlps, branches = _mlps(fields, len(kinds))
    config = ModelConfig(
        hidden_size=fields.take("hidden_size"),
        intermediate_size=width,
        layers=kinds,
        mixers={"mamba": _mamba(fields), "attention": _attention(fields), **branches},
        mlps=mlps,
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=fields.take("rms_norm_eps", 1e-6),
    )
    return config, lambda tensors: _weights(tensors, config)


def _kinds(fields: Fields) -> tuple[str, ...]:
    """The mixer of every layer."""
    period, offset = fields.take("attn_layer_period", 8), fields.take("attn_layer_offset", 4)
    kinds = [
        "attention" if i % period == offset else "mamba"
        for i in range(fields.take("num_hidden_layers"))
    ]
    fields.expect("layers_block_type", kinds)
    return tuple(kinds)


def _mlps(fields: Fields, count: int) -> tuple[int, tuple[str, ...], dict[str, dict[str, Any]]]:
    """Width of the MLPs, or what follows every mixer and the tables of that."""
    experts = fields.first("num_experts", "num_local_experts", default=16)
    period, offset = fields.take("expert_layer_period", 2), fields.take("expert_layer_offset", 1)
    width = fields.take("intermediate_size")
    moe = {
        "type": "moe",
        "num_experts": experts,
        "experts_per_token": fields.take("num_experts_per_tok", 2),
        "intermediate_size": width,
        "norm_topk_prob": False,
    }
    return sparse_layers([experts > 1 and i % period == offset for i in range(count)], moe, width)


def _mamba(fields: Fields) -> dict[str, object]:
    """The table of the Mamba layers."""
    hidden, rank = fields.take("hidden_size"), fields.take("mamba_dt_rank", "auto")
    return {
        "type": "mamba",
        "inner_size": fields.take("mamba_expand", 2) * hidden,
        "state_size": fields.take("mamba_d_state", 16),
        "dt_rank": math.ceil(hidden / 16) if rank == "auto" else rank,
        "conv_size": fields.take("mamba_d_conv", 4),
        "bias": fields.take("mamba_proj_bias", False),
        "conv_bias": fields.take("mamba_conv_bias", True),
        "inner_norm_eps": fields.take("rms_norm_eps", 1e-6),
    }


def _attention(fields: Fields) -> dict[str, object]:
    """The table of the attention layers."""
    heads = fields.take("num_attention_heads")
    return {
        "type": "attention",
        "num_heads": heads,
        "num_kv_heads": fields.take("num_key_value_heads", heads),
        "head_dim": fields.take("head_dim", fields.take("hidden_size") // heads),
        "window": 0,
        "rotary_dim": 0,
    }


def _weights(tensors: Tensors, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    yield "embedding.weight", tensors("model.embed_tokens.weight")
    for i, kind in enumerate(config.layers):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        yield f"{ours}mixer_norm.weight", tensors(f"{theirs}input_layernorm.weight")
        if kind == "mamba":
            for name, tensor in mamba(tensors, f"{theirs}mamba.", config.mixers["mamba"]):
                yield f"{ours}mixer.{name}", tensor
            for part in ("dt", "b", "c"):
                norm = tensors(f"{theirs}mamba.{part}_layernorm.weight")
                yield f"{ours}mixer.{part}_norm.weight", norm
        else:
            rows = stacked(tensors, *(f"{theirs}self_attn.{n}_proj.weight" for n in "qkv"))
            yield f"{ours}mixer.qkv_proj.weight", rows
            yield f"{ours}mixer.out_proj.weight", tensors(f"{theirs}self_attn.o_proj.weight")
        yield f"{ours}mlp_norm.weight", tensors(f"{theirs}pre_ff_layernorm.weight")
        own = f"{theirs}feed_forward."
        if config.mlps and config.mlps[i] == "moe":
            yield f"{ours}mlp.router.weight", tensors(f"{own}router.weight")
            count = config.mixers["moe"]["num_experts"]
            for name, tensor in experts(tensors, f"{own}experts.", count):
                yield f"{ours}mlp.experts.{name}", tensor
        else:
            for name, tensor in gated_mlp(tensors, own):
                yield f"{ours}mlp.{name}", tensor
    yield "norm.weight", tensors("model.final_layernorm.weight")
    yield from head(tensors, config.tie_word_embeddings)
