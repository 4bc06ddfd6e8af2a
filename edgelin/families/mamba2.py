"""Mamba-2 in the layout of transformers (``mamba2``: mamba2-130m-hf to 2.7b, Codestral-Mamba).

A layer is a norm and a mixer, nothing follows it. ``in_proj`` holds the rows of the gate, of x, B,
C and of the step; we keep the step in a projection of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("mamba2",)


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    hidden = fields.take("hidden_size")
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("use_bias", False)
    fields.expect("use_conv_bias", True)
    fields.expect("rms_norm", True)
    low, high = fields.take("time_step_limit", (0.0, math.inf))
    if low > 0 or high < math.inf:
        fields.expect("time_step_limit")
    fields.ignore(
        "residual_in_fp32", "rescale_prenorm_residual", "chunk_size", "expand",
        "time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "norm_before_gate",
    )  # fmt: skip
    table = {
        "type": "mamba2",
        "num_heads": fields.take("num_heads"),
        "head_dim": fields.take("head_dim"),
        "state_size": fields.take("state_size"),
        "num_groups": fields.take("n_groups"),
        "conv_size": fields.take("conv_kernel"),
    }
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=0,
        layers=("mamba",) * fields.take("num_hidden_layers"),
        mixers={"mamba": table},
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=fields.take("layer_norm_epsilon"),
    )
    return config, lambda tensors: _weights(tensors, config)


def _weights(tensors: Tensors, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    yield "embedding.weight", tensors("backbone.embeddings.weight")
    heads = config.mixers["mamba"]["num_heads"]
    for i in range(len(config.layers)):
        theirs, ours = f"backbone.layers.{i}.", f"blocks.{i}."
        yield f"{ours}mixer_norm.weight", tensors(f"{theirs}norm.weight")
        rows = tensors(f"{theirs}mixer.in_proj.weight")
        yield f"{ours}mixer.in_proj.weight", rows[:-heads]
        yield f"{ours}mixer.dt_proj.weight", rows[-heads:]
        yield f"{ours}mixer.conv_weight", tensors(f"{theirs}mixer.conv1d.weight")[:, 0]
        yield f"{ours}mixer.conv_bias", tensors(f"{theirs}mixer.conv1d.bias")
        for name in ("dt_bias", "A_log", "D", "norm.weight", "out_proj.weight"):
            yield f"{ours}mixer.{name}", tensors(f"{theirs}mixer.{name}")
    yield "norm.weight", tensors("backbone.norm_f.weight")
    if not config.tie_word_embeddings:
        yield "head.weight", tensors("lm_head.weight")
    elif tensors.has("lm_head.weight"):
        tensors.ignore("lm_head.weight")
