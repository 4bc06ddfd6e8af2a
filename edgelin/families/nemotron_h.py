"""Nemotron-H (``nemotron_h``: Nemotron-H, Nano v2, Nemotron 3).

A layer is a norm and one branch: Mamba-2, attention without positions, an MLP with the square of
ReLU, or experts of such MLPs beside one that computes every token. Which one, a string says
(``hybrid_override_pattern``: M, *, - and E) or a list of words. The step dt is bounded by
``time_step_limit``, with which the models were trained; ``time_step_min`` is of the initial values,
although transformers' full pass (not its step) takes it for a bound: with transformers' default
config (time_step_min 0.001) our logits are about 4e-4 from those of its class for that reason.

The router takes sigmoids, and a bias that counts in the choice only. ``routed_scaling_factor``, on
what the experts add, is folded into their weights. Experts may be narrower than the stream
(``moe_latent_size``: Nemotron 3 Super).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.common import attention, attention_table, head, mamba2, scaled, step_limits
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("nemotron_h",)
SKIP = r"^mtp\."  # predicts further tokens, for drafts
_WORDS = {
    "M": "mamba", "mamba": "mamba", "linear_attention": "mamba",
    "*": "attention", "attention": "attention", "full_attention": "attention",
    "-": "mlp", "mlp": "mlp",
    "E": "moe", "moe": "moe",
}  # fmt: skip
_EXPERTS = (
    "n_routed_experts", "num_local_experts", "n_shared_experts", "moe_intermediate_size",
    "moe_shared_expert_intermediate_size", "moe_latent_size", "num_experts_per_tok",
    "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob",
)  # fmt: skip
_PATTERNS = ("layers_block_type", "layer_types", "hybrid_override_pattern")


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    kinds, eps = _kinds(fields), fields.take("layer_norm_epsilon", 1e-5)
    bias, factor = fields.take("mlp_bias", False), 1.0
    tables = {
        "mamba": _mamba(fields),
        "attention": _attention(fields),
        "mlp": {
            "type": "mlp",
            "intermediate_size": fields.take("intermediate_size"),
            "activation": "relu2",
            "gated": False,
            "bias": bias,
        },
    }
    if "moe" in kinds:
        tables["moe"] = _experts(fields) | {"bias": bias}
        factor = fields.take("routed_scaling_factor", 1.0)
    fields.expect("mlp_hidden_act", "relu2")
    for name in ("norm_eps", "rms_norm_eps"):
        fields.expect(name, eps)
    # Precisions, initial values, an order of computation, drafts, and experts where there are none.
    fields.ignore(
        "residual_in_fp32", "rescale_prenorm_residual", "moe_shared_expert_overlap",
        "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
        *_EXPERTS,
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
    return config, lambda tensors: _weights(tensors, config, factor)


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
            raise EdgelinError(
                f"{fields.where}: {name} has {odd[0]!r}; supported: {', '.join(map(repr, _WORDS))}"
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


def _experts(fields: Fields) -> dict[str, Any]:
    """The experts' table."""
    fields.expect("n_shared_experts", 1)
    return {
        "type": "moe",
        "num_experts": fields.first("n_routed_experts", "num_local_experts", default=8),
        "experts_per_token": fields.take("num_experts_per_tok", 2),
        "intermediate_size": fields.take("moe_intermediate_size", 7688),
        "router": "sigmoid",
        "norm_topk_prob": fields.take("norm_topk_prob", True),
        "expert_bias": True,
        "sum_eps": 1e-20,
        "num_groups": fields.take("n_group", 1),
        "groups_per_token": fields.take("topk_group", 1),
        "gated": False,
        "latent_size": fields.take("moe_latent_size", 0),
        "shared_size": fields.take("moe_shared_expert_intermediate_size", 7688),
    }


def _weights(tensors: Tensors, config: ModelConfig, factor: float) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    root = "backbone." if tensors.has("backbone.embeddings.weight") else "model."
    yield "embedding.weight", tensors(f"{root}embeddings.weight")
    for i, kind in enumerate(config.layers):
        theirs, ours, table = f"{root}layers.{i}.", f"blocks.{i}.", config.mixers[kind]
        yield f"{ours}mixer_norm.weight", tensors(f"{theirs}norm.weight")
        if kind == "mlp":
            branch = _linears(tensors, f"{theirs}mixer.", table, ("up_proj", "down_proj"))
        elif kind == "moe":
            branch = _moe(tensors, f"{theirs}mixer.", table, factor)
        elif kind == "mamba":
            branch = mamba2(tensors, f"{theirs}mixer.", table)
        else:
            branch = attention(tensors, f"{theirs}mixer.", table)
        for name, tensor in branch:
            yield f"{ours}mixer.{name}", tensor
    yield "norm.weight", tensors(f"{root}norm_f.weight")
    yield from head(tensors, config.tie_word_embeddings, embedding=f"{root}embeddings.weight")


def _linears(
    tensors: Tensors, prefix: str, table: Mapping[str, Any], names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Projections, with the biases that the table says."""
    for name in names:
        for part in ("weight", "bias") if table["bias"] else ("weight",):
            yield f"{name}.{part}", tensors(f"{prefix}{name}.{part}")


def _moe(
    tensors: Tensors, prefix: str, table: Mapping[str, Any], factor: float
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of our experts; a file has all in one tensor, or each on its own."""
    yield "router.weight", tensors(f"{prefix}gate.weight")
    yield "expert_bias", tensors(f"{prefix}gate.e_score_correction_bias")
    for name in ("up_proj", "down_proj"):
        own = f"{prefix}experts."
        if tensors.has(f"{own}{name}"):
            all_ = tensors(f"{own}{name}")
        else:
            count = table["num_experts"]
            all_ = torch.stack([tensors(f"{own}{i}.{name}.weight") for i in range(count)])
        yield f"experts.{name}", scaled(all_, factor if name == "down_proj" else 1.0)
    for name, tensor in _linears(
        tensors, f"{prefix}shared_experts.", table, ("up_proj", "down_proj")
    ):
        yield f"shared.{name}", tensor
    if table["latent_size"]:
        for ours, theirs in (("in_proj", "fc1_latent_proj"), ("out_proj", "fc2_latent_proj")):
            for name, tensor in _linears(tensors, prefix, table, (theirs,)):
                yield name.replace(theirs, ours), tensor
