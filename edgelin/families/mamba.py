"""Mamba: transformers' layout (``mamba``, ``falcon_mamba``) and the original of ``state-spaces``.

A layer is a norm and a mixer, nothing follows it. Falcon-Mamba has norms without weights on the
step, B and C. The original folders (``mamba-130m`` to ``2.8b``) have no ``model_type``, other names
of sizes, a vocabulary that is padded to a multiple, and in ``ssm_cfg`` the keys of the mixer's
class. ``intermediate_size`` goes before ``expand``, which is wrong in Falcon-Mamba's config.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from edgelin.families.common import head, mamba, state_spaces
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("mamba", "falcon_mamba")


def matches(values: Mapping[str, Any]) -> bool:
    """Whether a config without ``model_type`` is of the original code, with Mamba in it."""
    own = values.get("ssm_cfg")
    return (
        "d_model" in values and isinstance(own, Mapping) and own.get("layer", "Mamba1") == "Mamba1"
    )


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    original = not fields.has("model_type")
    config = state_spaces(fields, _original) if original else _transformers(fields)
    return config, lambda tensors: _weights(tensors, config)


def _transformers(fields: Fields) -> ModelConfig:
    """Sizes from the keys of transformers."""
    fields.expect("hidden_act", "silu", "swish")
    fields.ignore(  # initial values, precisions and forms of the computation
        "residual_in_fp32", "rescale_prenorm_residual", "time_step_scale", "time_step_min",
        "time_step_max", "time_step_init_scheme", "time_step_floor", "use_mambapy",
        "use_falcon_mambapy", "use_associative_scan",
    )  # fmt: skip
    hidden, count = fields.take("hidden_size"), fields.take("num_hidden_layers")
    inner = fields.take("intermediate_size", int(fields.take("expand", 2) * hidden))
    falcon = fields.take("model_type") == "falcon_mamba"
    table = {
        "type": "mamba",
        "inner_size": inner,
        "state_size": fields.take("state_size", 16),
        "dt_rank": _rank(fields.take("time_step_rank", "auto"), hidden),
        "conv_size": fields.take("conv_kernel", 4),
        "bias": fields.take("use_bias", False),
        "conv_bias": fields.take("use_conv_bias", True),
        "inner_norm_eps": fields.take("mixer_rms_eps", 1e-6) if falcon else 0.0,
    }
    # What conversions of the original folders have left in their configs.
    for name, value in (("d_model", hidden), ("d_inner", inner), ("n_layer", count)):
        fields.expect(name, value)
    fields.expect("rms_norm", True)
    fields.expect("ssm_cfg", {})
    fields.ignore("fused_add_norm", "pad_vocab_size_multiple")
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=0,
        layers=("mamba",) * count,
        mixers={"mamba": table},
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", True),
        rms_norm_eps=fields.take("layer_norm_epsilon", 1e-5),
    )


def _original(own: Fields, hidden: int) -> dict[str, Any]:
    """The mixer's table from ``ssm_cfg`` of the original code."""
    own.ignore("dt_init", "dt_scale", "use_fast_path")  # initial values, a form of computing
    return {
        "type": "mamba",
        "inner_size": int(own.take("expand", 2) * hidden),
        "state_size": own.take("d_state", 16),
        "dt_rank": _rank(own.take("dt_rank", "auto"), hidden),
        "conv_size": own.take("d_conv", 4),
        "bias": own.take("bias", False),
        "conv_bias": own.take("conv_bias", True),
        "inner_norm_eps": 0.0,
    }


def _rank(value: int | str, hidden: int) -> int:
    """Inner width of the step's projections."""
    return math.ceil(hidden / 16) if value == "auto" else int(value)


def _weights(tensors: Tensors, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    parts = ("weight",) if config.norm == "rms" else ("weight", "bias")
    table = config.mixers["mamba"]
    plural = tensors.has("backbone.embeddings.weight")
    embedding = f"backbone.embedding{'s' if plural else ''}.weight"
    yield "embedding.weight", tensors(embedding)
    for i in range(len(config.layers)):
        theirs, ours = f"backbone.layers.{i}.", f"blocks.{i}."
        for part in parts:
            yield f"{ours}mixer_norm.{part}", tensors(f"{theirs}norm.{part}")
        for name, tensor in mamba(tensors, f"{theirs}mixer.", table):
            yield f"{ours}mixer.{name}", tensor
        if table["inner_norm_eps"]:
            for name, key in (("dt", "dt_rank"), ("b", "state_size"), ("c", "state_size")):
                yield f"{ours}mixer.{name}_norm.weight", torch.ones(table[key])
    for part in parts:
        yield f"norm.{part}", tensors(f"backbone.norm_f.{part}")
    yield from head(tensors, config.tie_word_embeddings, embedding=embedding)
