"""OLMo Hybrid (``olmo_hybrid``: Olmo-Hybrid-7B): Gated DeltaNet and attention, 3 to 1.

Layers of Gated DeltaNet normalise what their branches read, layers of attention what their branches
add; queries and keys are normalised over all heads together. Beta may reach 2, and the norm in
Gated DeltaNet has an epsilon of its own, 1e-5, whatever the config says. The published models know
no positions, which their configs say by ``rope_theta: null``. A config without ``rope_parameters``
says nothing: some readers fill in a base, others take it for the same as null.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.common import (
    attention,
    attention_table,
    gated_mlp,
    head,
    layer_types,
    rope,
    stacked,
)
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("olmo_hybrid",)
SKIP = r"^mtp\."
_WORDS = {"linear_attention": "deltanet", "full_attention": "attention"}
_NORM_EPS = 1e-5


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    hidden, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("linear_use_gate", True)
    fields.ignore(
        "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
        "linear_dt_init_floor",
    )  # fmt: skip
    count = fields.take("num_hidden_layers")
    kinds = ["deltanet" if (i + 1) % 4 else "attention" for i in range(count)]
    if "attention" not in kinds:
        kinds[-1] = "attention"
    attending = attention_table(fields)
    attending |= {"joint_qk_norm": True, **_rotation(fields, attending["head_dim"])}
    key_heads = fields.take("linear_num_key_heads", heads)
    key_dim = fields.take("linear_key_head_dim", int(0.75 * hidden / key_heads))
    deltanet = {
        "type": "gated_deltanet",
        "num_heads": fields.take("linear_num_value_heads", heads),
        "num_key_heads": key_heads,
        "key_dim": key_dim,
        "value_dim": fields.take("linear_value_head_dim", 2 * key_dim),
        "conv_size": fields.take("linear_conv_kernel_dim", 4),
        "allow_neg_eigval": fields.take("linear_allow_neg_eigval", True),
        "norm_eps": _NORM_EPS,
    }
    layers = tuple(layer_types(fields, _WORDS, kinds))
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=fields.take("intermediate_size"),
        layers=layers,
        mixers={"deltanet": deltanet, "attention": attending},
        vocab_size=fields.take("vocab_size"),
        norm_places=tuple("after" if kind == "attention" else "before" for kind in layers),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=fields.take("rms_norm_eps"),
    )
    return config, lambda tensors: _weights(tensors, config)


def _rotation(fields: Fields, head_dim: int) -> dict[str, Any]:
    """Rotation as options of our attention."""
    table = fields.nested("rope_parameters") if fields.has("rope_parameters") else fields
    if table.has("rope_theta"):
        return rope(fields, head_dim)
    if not table.is_null("rope_theta"):
        raise EdgelinError(
            f"{table.where} has no rope_theta, which readers take for different things; set "
            f'rope_parameters to {{"rope_theta": null}} if the model knows no positions, else to '
            f"its base"
        )
    if table is not fields:
        table.expect("rope_type", "default")
        table.finish()
    return {"rotary_dim": 0}


def _weights(tensors: Tensors, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    yield "embedding.weight", tensors("model.embed_tokens.weight")
    for i, kind in enumerate(config.layers):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        part, place, names = _PARTS[kind]
        for name, tensor in part(tensors, theirs, config):
            yield f"{ours}mixer.{name}", tensor
        for branch, spellings in zip(("mixer", "mlp"), names, strict=True):
            yield f"{ours}{branch}_{place}.weight", _first(tensors, theirs, spellings)
        for name, tensor in gated_mlp(tensors, f"{theirs}mlp."):
            yield f"{ours}mlp.{name}", tensor
    yield "norm.weight", tensors("model.norm.weight")
    yield from head(tensors, config.tie_word_embeddings)


def _first(tensors: Tensors, prefix: str, spellings: tuple[str, ...]) -> Tensor:
    """The weight of a norm under the first of its names that is there."""
    names = [f"{prefix}{name}.weight" for name in spellings]
    return tensors(next(filter(tensors.has, names), names[0]))


def _deltanet(tensors: Tensors, layer: str, _: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a Gated DeltaNet."""
    own = f"{layer}linear_attn."
    for name, letters in (("qkv_gate_proj", "qkvg"), ("beta_decay_proj", "ba")):
        rows = (f"{own}{letter}_proj.weight" for letter in letters)
        yield f"{name}.weight", stacked(tensors, *rows)
    # Channels of q, k and v in three tensors, not always cut between q, k and v.
    parts = [f"{own}{letter}_conv1d.weight" for letter in "qkv"]
    yield "conv_weight", stacked(tensors, *parts)[:, 0]
    for name in ("A_log", "dt_bias"):
        yield name, tensors(f"{own}{name}")
    yield "norm.norm.weight", tensors(f"{own}o_norm.weight")
    yield "out_proj.weight", tensors(f"{own}o_proj.weight")


def _attention(tensors: Tensors, layer: str, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Parameters of an attention."""
    own = f"{layer}self_attn."
    yield from attention(tensors, own, config.mixers["attention"])
    for name in ("q_norm.weight", "k_norm.weight"):
        yield name, tensors(f"{own}{name}")


# What a kind of layer holds: its mixer, where it is normalised, and its two norms' names. Those of
# the published files come first, those that transformers writes second.
_PARTS = {
    "deltanet": (
        _deltanet,
        "norm",
        (
            ("input_layernorm", "attention_layer_norm"),
            ("post_attention_layernorm", "feedforward_layer_norm"),
        ),
    ),
    "attention": (
        _attention,
        "post_norm",
        (("post_attention_layernorm", "feedforward_layer_norm"), ("post_feedforward_layernorm",)),
    ),
}
