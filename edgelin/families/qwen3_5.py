"""Qwen3.5 and Qwen3.6, text (``qwen3_5``: 0.8B to 27B; ``qwen3_5_moe``: 35B-A3B): Gated DeltaNet
and gated attention, 3 to 1.

A layer is a mixer and a gated MLP (or experts, and a gated MLP with a gate of its own for every
token), each behind an RMSNorm whose factor is 1 + weight; so are the final norm and those of
queries and keys, but not the norm in Gated DeltaNet. A key head serves several value heads.
``q_proj`` of the attention holds, head by head, the rows of the query and of the gate. A quarter of
a head is rotated; of the three positions of a token in pictures, text has only one, so that
``mrope_section`` changes nothing. Published checkpoints carry the text model's config inside
(``text_config``), a tower for pictures and a head that guesses further tokens ahead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from edgelin.families.common import (
    experts,
    gated_mlp,
    head,
    layer_types,
    rope,
    sparse_layers,
    stacked,
)
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
SKIP = r"^mtp\.|^(model\.)?visual\."
Part = Callable[[Tensors, str, ModelConfig], Iterator[tuple[str, Tensor]]]
_WORDS = {"linear_attention": "deltanet", "full_attention": "attention"}


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    text = fields.nested("text_config") if fields.has("text_config") else fields
    text.expect("norm_topk_prob", True)
    config = sizes(text)
    if text is not fields:
        text.finish()
        fields.ignore("vision_config")
        # Both tables may have it; the outer one speaks for the whole model.
        tied = fields.take("tie_word_embeddings", config.tie_word_embeddings)
        config = dataclasses.replace(config, tie_word_embeddings=tied)
    return config, lambda tensors: weights(tensors, config, _deltanet)


def sizes(fields: Fields) -> ModelConfig:
    """Sizes from the config of a text model, this one's or Qwen3-Next's."""
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("attn_output_gate", True)
    fields.expect("output_gate_type", "silu", "swish")
    fields.ignore("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    every, count = fields.take("full_attention_interval", 4), fields.take("num_hidden_layers")
    kinds = ["deltanet" if (i + 1) % every else "attention" for i in range(count)]
    head_dim, bias = fields.take("head_dim"), fields.take("attention_bias", False)
    attention = {
        "type": "attention",
        "num_heads": fields.take("num_attention_heads"),
        "num_kv_heads": fields.take("num_key_value_heads"),
        "head_dim": head_dim,
        "window": 0,
        "qk_norm": True,
        "gate": True,
        "bias": bias,
        "out_bias": bias,
        **rope(fields, head_dim, partial=0.25, harmless=("mrope_section", "mrope_interleaved")),
    }
    deltanet = {
        "type": "gated_deltanet",
        "num_heads": fields.take("linear_num_value_heads"),
        "num_key_heads": fields.take("linear_num_key_heads"),
        "key_dim": fields.take("linear_key_head_dim"),
        "value_dim": fields.take("linear_value_head_dim"),
        "conv_size": fields.take("linear_conv_kernel_dim"),
    }
    width, mlps, branches = _mlps(fields, count)
    return ModelConfig(
        hidden_size=fields.take("hidden_size"),
        intermediate_size=width,
        layers=tuple(layer_types(fields, _WORDS, kinds)),
        mixers={"deltanet": deltanet, "attention": attention, **branches},
        mlps=mlps,
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=fields.take("rms_norm_eps"),
    )


def _mlps(fields: Fields, count: int) -> tuple[int, tuple[str, ...], dict[str, dict[str, Any]]]:
    """Width of the MLPs, or what follows every mixer and the tables of that."""
    fields.ignore("router_aux_loss_coef")
    every, dense = fields.take("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    moe = {
        "type": "moe",
        "num_experts": fields.take("num_experts", 0),
        "experts_per_token": fields.take("num_experts_per_tok", 0),
        "intermediate_size": fields.take("moe_intermediate_size", 0),
        "norm_topk_prob": fields.take("norm_topk_prob", True),
        "shared_size": fields.take("shared_expert_intermediate_size", 0),
        "shared_gate": True,
    }
    found = moe["num_experts"] > 0
    sparse = [found and (i + 1) % every == 0 and i not in dense for i in range(count)]
    width = fields.take("intermediate_size", 0) if all(sparse) else fields.take("intermediate_size")
    return sparse_layers(sparse, moe, width)


def weights(tensors: Tensors, config: ModelConfig, deltanet: Part) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order; ``deltanet`` reads those of a Gated DeltaNet."""
    nested = tensors.has("model.language_model.embed_tokens.weight")
    model = "model.language_model." if nested else "model."
    yield "embedding.weight", tensors(f"{model}embed_tokens.weight")
    for i, kind in enumerate(config.layers):
        theirs, ours = f"{model}layers.{i}.", f"blocks.{i}."
        yield f"{ours}mixer_norm.weight", _factor(tensors, f"{theirs}input_layernorm")
        part = deltanet if kind == "deltanet" else _attention
        for name, tensor in part(tensors, theirs, config):
            yield f"{ours}mixer.{name}", tensor
        yield f"{ours}mlp_norm.weight", _factor(tensors, f"{theirs}post_attention_layernorm")
        sparse = bool(config.mlps) and config.mlps[i] == "moe"
        for name, tensor in (_moe if sparse else _mlp)(tensors, theirs, config):
            yield f"{ours}mlp.{name}", tensor
    yield "norm.weight", _factor(tensors, f"{model}norm")
    embedding = f"{model}embed_tokens.weight"
    yield from head(tensors, config.tie_word_embeddings, embedding=embedding)


def _factor(tensors: Tensors, name: str) -> Tensor:
    """The factor of a norm that is stored as its distance from 1."""
    return 1 + tensors.full(f"{name}.weight")


def _mlp(tensors: Tensors, layer: str, _: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a gated MLP."""
    yield from gated_mlp(tensors, f"{layer}mlp.")


def _moe(tensors: Tensors, layer: str, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Parameters of experts and of the MLP beside them."""
    own = f"{layer}mlp."
    yield "router.weight", tensors(f"{own}gate.weight")
    for name, tensor in experts(tensors, f"{own}experts.", config.mixers["moe"]["num_experts"]):
        yield f"experts.{name}", tensor
    for name, tensor in gated_mlp(tensors, f"{own}shared_expert."):
        yield f"shared.{name}", tensor
    yield "shared_router.weight", tensors(f"{own}shared_expert_gate.weight")


def _deltanet(tensors: Tensors, layer: str, _: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a Gated DeltaNet."""
    own = f"{layer}linear_attn."
    rows = stacked(tensors, f"{own}in_proj_qkv.weight", f"{own}in_proj_z.weight")
    yield "qkv_gate_proj.weight", rows
    rows = stacked(tensors, f"{own}in_proj_b.weight", f"{own}in_proj_a.weight")
    yield "beta_decay_proj.weight", rows
    yield from deltanet_core(tensors, own)


def deltanet_core(tensors: Tensors, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a Gated DeltaNet behind its projections of the stream."""
    yield "conv_weight", tensors(f"{prefix}conv1d.weight")[:, 0]
    for name in ("A_log", "dt_bias", "out_proj.weight"):
        yield name, tensors(f"{prefix}{name}")
    yield "norm.norm.weight", tensors(f"{prefix}norm.weight")


def _attention(tensors: Tensors, layer: str, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Parameters of an attention."""
    own, table = f"{layer}self_attn.", config.mixers["attention"]
    for kind in ("weight", "bias") if table["bias"] else ("weight",):
        # [query | gate] of every head
        both = tensors(f"{own}q_proj.{kind}").unflatten(0, (table["num_heads"], 2, -1))
        keys, values = (tensors(f"{own}{n}_proj.{kind}") for n in "kv")
        queries, gates = (part.flatten(0, 1) for part in both.unbind(1))
        yield f"qkv_proj.{kind}", torch.cat([queries, keys, values, gates])
        yield f"out_proj.{kind}", tensors(f"{own}o_proj.{kind}")
    yield "q_norm.weight", _factor(tensors, f"{own}q_norm")
    yield "k_norm.weight", _factor(tensors, f"{own}k_norm")
