"""Falcon-H1 (``falcon_h1``: 90M to 34B): Mamba-2 and attention side by side in every layer.

Both read the same normed input, their outputs are added, and a gated MLP follows. A dozen factors
(``*_multiplier``) scale the stream, every part's inputs, outputs and rows; all are folded into
weights. Most models have no norm between the recurrence and ``out_proj`` (``mamba_rms_norm``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from edgelin.families.common import (
    attention,
    attention_table,
    head,
    mamba2,
    mamba2_table,
    rope,
    scaled,
)
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("falcon_h1",)
_FACTORS = (
    "embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out",
)  # fmt: skip
_NORMS = {
    (False, False): "none",
    (False, True): "none",
    (True, False): "after_gate",
    (True, True): "before_gate",
}


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("mlp_bias", False)
    fields.expect("mamba_use_mlp", True)
    fields.expect("attn_layer_indices", list(range(fields.take("num_hidden_layers"))))
    fields.ignore(  # initial values, and what the published class does not read
        "time_step_min", "time_step_max", "time_step_floor", "time_step_rank",
        "mlp_expansion_factor",
    )  # fmt: skip
    config = ModelConfig(
        hidden_size=fields.take("hidden_size"),
        intermediate_size=fields.take("intermediate_size"),
        layers=("both",) * fields.take("num_hidden_layers"),
        mixers={"both": {"type": "parallel", "parts": [_mamba(fields), _attention(fields)]}},
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=fields.take("rms_norm_eps"),
    )
    factors = {name: fields.take(f"{name}_multiplier", 1.0) for name in _FACTORS}
    factors["gate"], factors["down"] = fields.take("mlp_multipliers", [1.0, 1.0])
    sections = fields.take("ssm_multipliers", [1.0] * 5)
    return config, lambda tensors: _weights(tensors, config, factors, sections)


def _mamba(fields: Fields) -> dict[str, Any]:
    """Mamba-2's table; the output projection has a switch of its own for its bias."""
    inner = fields.take("mamba_d_ssm", fields.take("mamba_expand", 2) * fields.take("hidden_size"))
    norm = (fields.take("mamba_rms_norm", False), fields.take("mamba_norm_before_gate", True))
    own = {"norm": _NORMS[norm], "out_bias": fields.take("projectors_bias", False)}
    return mamba2_table(fields, inner) | own


def _attention(fields: Fields) -> dict[str, Any]:
    """Attention's table."""
    table = attention_table(fields)
    return table | rope(fields, table["head_dim"])


def _weights(
    tensors: Tensors, config: ModelConfig, factors: Mapping[str, float], sections: list[float]
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    tied = config.tie_word_embeddings
    embedding = factors["embedding"]
    yield "embedding.weight", scaled(tensors("model.embed_tokens.weight"), embedding)
    for i in range(len(config.layers)):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        yield f"{ours}mixer_norm.weight", tensors(f"{theirs}input_layernorm.weight")
        for name, tensor in _mixers(tensors, theirs, config, factors, sections):
            yield f"{ours}mixer.parts.{name}", tensor
        yield f"{ours}mlp_norm.weight", tensors(f"{theirs}pre_ff_layernorm.weight")
        mlp = f"{theirs}feed_forward."
        gate = scaled(tensors(f"{mlp}gate_proj.weight"), factors["gate"])
        up = tensors(f"{mlp}up_proj.weight")
        yield f"{ours}mlp.gate_up_proj.weight", torch.cat([gate, up])
        down = scaled(tensors(f"{mlp}down_proj.weight"), factors["down"])
        yield f"{ours}mlp.down_proj.weight", down
    # A tied head has the factor of the embedding in its weight.
    logits = factors["lm_head"] / (embedding if tied else 1.0)
    yield "norm.weight", scaled(tensors("model.final_layernorm.weight"), logits)
    yield from head(tensors, tied)


def _mixers(
    tensors: Tensors,
    layer: str,
    config: ModelConfig,
    factors: Mapping[str, float],
    sections: list[float],
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the two parts."""
    ssm, heads = config.mixers["both"]["parts"]
    rows: float | Tensor = 1.0
    if sections != [1.0] * 5:
        inner, group = ssm["num_heads"] * ssm["head_dim"], ssm["num_groups"] * ssm["state_size"]
        counts = torch.tensor([inner, inner, group, group, ssm["num_heads"]])
        rows = torch.tensor(sections).repeat_interleave(counts)
    parts = (
        mamba2(
            tensors,
            f"{layer}mamba.",
            ssm,
            inputs=factors["ssm_in"],
            rows=rows,
            outputs=factors["ssm_out"],
        ),
        attention(
            tensors,
            f"{layer}self_attn.",
            heads,
            inputs=factors["attention_in"],
            keys=factors["key"],
            outputs=factors["attention_out"],
        ),
    )
    for i, part in enumerate(parts):
        for name, tensor in part:
            yield f"{i}.{name}", tensor
