"""Mamba-2: transformers' layout (``mamba2``: Codestral-Mamba, ``-hf`` folders) and the original.

A layer is a norm and a mixer, nothing follows it. The original folders (``mamba2-130m`` to ``2.7b``
of ``state-spaces``) have no ``model_type``, other names of sizes, a vocabulary that is padded to a
multiple, and in ``ssm_cfg`` the keys of the mixer's class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from edgelin.families.common import head, mamba2, state_spaces, step_limits
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("mamba2",)


def matches(values: Mapping[str, Any]) -> bool:
    """Whether a config without ``model_type`` is of the original code, with Mamba-2 in it."""
    own = values.get("ssm_cfg")
    return "d_model" in values and isinstance(own, Mapping) and own.get("layer") == "Mamba2"


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    original = not fields.has("model_type")
    config = state_spaces(fields, _original) if original else _transformers(fields)
    embedding = "backbone.embedding.weight" if original else "backbone.embeddings.weight"
    return config, lambda tensors: _weights(tensors, config, embedding)


def _transformers(fields: Fields) -> ModelConfig:
    """Sizes from the keys of transformers."""
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("rms_norm", True)
    fields.ignore(  # initial values, precisions, and an order of norm and gate that nothing reads
        "residual_in_fp32", "rescale_prenorm_residual", "chunk_size", "time_step_rank",
        "time_step_min", "time_step_max", "time_step_floor", "time_step_scale",
        "time_step_init_scheme", "norm_before_gate",
    )  # fmt: skip
    hidden, bias = fields.take("hidden_size"), fields.take("use_bias", False)
    table = {
        "type": "mamba2",
        "num_heads": fields.take("num_heads"),
        "head_dim": fields.take("head_dim"),
        "state_size": fields.take("state_size"),
        "num_groups": fields.take("n_groups"),
        "conv_size": fields.take("conv_kernel"),
        "norm": "after_gate",
        "bias": bias,
        "out_bias": bias,
        "conv_bias": fields.take("use_conv_bias", True),
        **step_limits(fields),
    }
    fields.expect("expand", table["num_heads"] * table["head_dim"] / hidden)
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=0,
        layers=("mamba",) * fields.take("num_hidden_layers"),
        mixers={"mamba": table},
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=fields.take("layer_norm_epsilon", 1e-5),
    )


def _original(own: Fields, hidden: int) -> dict[str, Any]:
    """The mixer's table from ``ssm_cfg`` of the original code."""
    own.ignore(  # initial values and forms of the computation
        "chunk_size", "use_mem_eff_path", "conv_init", "A_init_range", "sequence_parallel",
    )  # fmt: skip
    inner, head_dim = own.take("expand", 2) * hidden, own.take("headdim", 64)
    own.expect("d_ssm", inner)
    own.expect("D_has_hdim", False)
    own.expect("rmsnorm", True)
    bias = own.take("bias", False)
    return {
        "type": "mamba2",
        "num_heads": inner // head_dim,
        "head_dim": head_dim,
        "state_size": own.take("d_state", 128),
        "num_groups": own.take("ngroups", 1),
        "conv_size": own.take("d_conv", 4),
        "norm": "before_gate" if own.take("norm_before_gate", False) else "after_gate",
        "bias": bias,
        "out_bias": bias,
        "conv_bias": own.take("conv_bias", True),
        **step_limits(own, "dt_limit"),
    }


def _weights(tensors: Tensors, config: ModelConfig, embedding: str) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    parts = ("weight",) if config.norm == "rms" else ("weight", "bias")
    yield "embedding.weight", tensors(embedding)
    for i in range(len(config.layers)):
        theirs, ours = f"backbone.layers.{i}.", f"blocks.{i}."
        for part in parts:
            yield f"{ours}mixer_norm.{part}", tensors(f"{theirs}norm.{part}")
        for name, tensor in mamba2(tensors, f"{theirs}mixer.", config.mixers["mamba"]):
            yield f"{ours}mixer.{name}", tensor
    for part in parts:
        yield f"norm.{part}", tensors(f"backbone.norm_f.{part}")
    yield from head(tensors, config.tie_word_embeddings, embedding=embedding)
