"""Nemotron-H (``nemotron_h``: Nemotron-H, Nano v2, Nemotron 3 Nano without experts).

A layer is a norm and one branch: Mamba-2, attention without positions, or an MLP with the square of
ReLU. Which one, a string says (``hybrid_override_pattern``: M, * and -) or a list of words. The
step dt is bounded by ``time_step_limit``, with which the models were trained; ``time_step_min`` is
of the initial values, although transformers' full pass (not its step) takes it for a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.common import attention, attention_table, head, mamba2, step_limits
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("nemotron_h",)
SKIP = r"^mtp\."  # predicts further tokens, for drafts
_WORDS = {
    "M": "mamba", "mamba": "mamba", "linear_attention": "mamba",
    "*": "attention", "attention": "attention", "full_attention": "attention",
    "-": "mlp", "mlp": "mlp",
}  # fmt: skip
_PATTERNS = ("layers_block_type", "layer_types", "hybrid_override_pattern")


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    kinds, eps = _kinds(fields), fields.take("layer_norm_epsilon", 1e-5)
    tables = {
        "mamba": _mamba(fields),
        "attention": _attention(fields),
        "mlp": {
            "type": "mlp",
            "intermediate_size": fields.take("intermediate_size"),
            "activation": "relu2",
            "gated": False,
            "bias": fields.take("mlp_bias", False),
        },
    }
    fields.expect("mlp_hidden_act", "relu2")
    for name in ("norm_eps", "rms_norm_eps"):
        fields.expect(name, eps)
    fields.ignore(  # precisions, initial values, experts and drafts that these models have not
        "residual_in_fp32", "rescale_prenorm_residual", "n_routed_experts", "n_shared_experts",
        "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size",
        "moe_shared_expert_overlap", "num_experts_per_tok", "routed_scaling_factor", "n_group",
        "topk_group", "norm_topk_prob", "num_nextn_predict_layers", "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
    )  # fmt: skip
    config = ModelConfig(
        hidden_size=fields.take("hidden_size"),
        intermediate_size=0,
        layers=tuple(kinds),
        mixers={name: table for name, table in tables.items() if name in kinds},
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=eps,
    )
    return config, lambda tensors: _weights(tensors, config)


def _kinds(fields: Fields) -> list[str]:
    """What every layer is, from all spellings that the config has."""
    found = {name: list(fields.take(name)) for name in _PATTERNS if fields.has(name)}
    if not found:
        raise EdgelinError(
            f"{fields.where} lacks the key {_PATTERNS[0]!r}, which this family needs"
        )
    every = []
    for name, words in found.items():
        if odd := [word for word in words if word not in _WORDS]:
            hint = "; models with experts are not supported" if odd[0] in ("E", "moe") else ""
            raise EdgelinError(
                f"{fields.where}: {name} has {odd[0]!r}; supported: "
                f"{', '.join(map(repr, _WORDS))}{hint}"
            )
        every.append([_WORDS[word] for word in words])
    if any(kinds != every[0] for kinds in every):
        raise EdgelinError(f"{fields.where}: {' and '.join(found)} name different layers")
    fields.expect("num_hidden_layers", len(every[0]))
    return every[0]


def _mamba(fields: Fields) -> dict[str, Any]:
    """Mamba-2's table, the keys also in the names of older configs."""
    fields.expect("mamba_hidden_act", "silu", "swish")
    fields.expect("mamba_proj_bias", False)
    fields.ignore(  # initial values, forms of the computation, and a width that nothing reads
        "time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "mamba_dt_min",
        "mamba_dt_max", "mamba_dt_init_floor", "chunk_size", "mamba_chunk_size",
        "use_mamba_kernels", "mamba_ssm_cache_dtype", "expand", "mamba_expand",
    )  # fmt: skip
    bias = fields.take("use_bias", False)
    limit = "mamba_dt_limit" if fields.has("mamba_dt_limit") else "time_step_limit"
    return {
        "type": "mamba2",
        "num_heads": fields.take("mamba_num_heads"),
        "head_dim": fields.take("mamba_head_dim"),
        "state_size": fields.take("ssm_state_size"),
        "num_groups": fields.first("n_groups", "mamba_n_groups"),
        "conv_size": fields.first("conv_kernel", "mamba_d_conv", default=4),
        "norm": "after_gate",
        "bias": bias,
        "out_bias": bias,
        "conv_bias": fields.first("use_conv_bias", "mamba_conv_bias", default=True),
        **step_limits(fields, limit),
    }


def _attention(fields: Fields) -> dict[str, Any]:
    """Attention's table. Configs have keys of a rotation, which the published class does not do."""
    fields.expect("attention_bias", False)
    fields.expect("sliding_window")
    fields.ignore("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    own = {"head_dim": fields.first("head_dim", "attention_head_dim", default=128)}
    return attention_table(fields) | own | {"rotary_dim": 0}


def _weights(tensors: Tensors, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    root = "backbone." if tensors.has("backbone.embeddings.weight") else "model."
    yield "embedding.weight", tensors(f"{root}embeddings.weight")
    for i, kind in enumerate(config.layers):
        theirs, ours, table = f"{root}layers.{i}.", f"blocks.{i}.", config.mixers[kind]
        yield f"{ours}mixer_norm.weight", tensors(f"{theirs}norm.weight")
        if kind == "mlp":
            parts = ("weight", "bias") if table["bias"] else ("weight",)
            names = [f"{name}_proj.{part}" for name in ("up", "down") for part in parts]
            branch = iter([(name, tensors(f"{theirs}mixer.{name}")) for name in names])
        elif kind == "mamba":
            branch = mamba2(tensors, f"{theirs}mixer.", table)
        else:
            branch = attention(tensors, f"{theirs}mixer.", table)
        for name, tensor in branch:
            yield f"{ours}mixer.{name}", tensor
    yield "norm.weight", tensors(f"{root}norm_f.weight")
    yield from head(tensors, config.tie_word_embeddings, embedding=f"{root}embeddings.weight")
