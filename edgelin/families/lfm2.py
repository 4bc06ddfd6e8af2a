"""LFM2 and LFM2.5 (``lfm2``: 350M to 2.6B): gated short convolutions and a few layers of attention.

Every layer is an operator and a gated MLP, each behind an RMSNorm; queries and keys are normalised
a head. The final norm is called ``embedding_norm``. Two things surprise: the width of the MLP is
two thirds of the one in the config, rounded up (``block_auto_adjust_ff_dim``), and older configs
have some keys under the names of the training code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from edgelin.families.common import head, layer_types, rope, stacked
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("lfm2",)
Part = Callable[[Tensors, str, int], Iterator[tuple[str, Tensor]]]
_WORDS = {"conv": "conv", "full_attention": "attention"}


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    layers, tables = operators(fields)
    hidden, attention = fields.take("hidden_size"), tables["attention"]
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=_mlp_width(fields),
        layers=layers,
        mixers=tables,
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.first("tie_embedding", "tie_word_embeddings", default=True),
        rms_norm_eps=fields.take("norm_eps", 1e-5),
    )
    # Names of the training code: repeated sizes, and switches that were never off.
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        fields.expect(name, hidden)
    fields.expect("num_heads", attention["num_heads"])
    fields.expect("theta", attention["rope_theta"])
    fields.expect("block_norm_eps", config.rms_norm_eps)
    fields.expect("block_use_swiglu", True)
    fields.expect("use_pos_enc", True)
    fields.ignore(
        "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init",
        "conv_use_xavier_init",
    )  # fmt: skip

    def second(tensors: Tensors, layer: str, _: int) -> Iterator[tuple[str, Tensor]]:
        return mlp(tensors, layer)

    return config, lambda tensors: weights(tensors, config, second)


def operators(fields: Fields) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """The mixer of every layer, and the tables of both."""
    hidden, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    full = fields.take("full_attn_idxs", range(fields.take("num_hidden_layers")))
    kinds = ["attention" if i in full else "conv" for i in range(fields.take("num_hidden_layers"))]
    head_dim = fields.take("head_dim", hidden // heads)
    attention = {
        "type": "attention",
        "num_heads": heads,
        "num_kv_heads": fields.take("num_key_value_heads"),
        "head_dim": head_dim,
        "window": 0,
        "qk_norm": True,
        **rope(fields, head_dim, theta=1e6),
    }
    conv = {
        "type": "short_conv",
        "conv_size": fields.take("conv_L_cache", 3),
        "bias": fields.take("conv_bias", False),
    }
    return tuple(layer_types(fields, _WORDS, kinds)), {"conv": conv, "attention": attention}


def _mlp_width(fields: Fields) -> int:
    """Width inside the MLP, in the steps of the training code."""
    width: int = fields.first("block_ff_dim", "intermediate_size")
    multiple = fields.take("block_multiple_of", 256)
    factor = fields.take("block_ffn_dim_multiplier", 1.0)
    if not fields.take("block_auto_adjust_ff_dim", True):
        return width
    width = int(factor * int(2 * width / 3))
    return int(multiple * -(-width // multiple))


def weights(tensors: Tensors, config: ModelConfig, second: Part) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order; ``second`` reads what follows a mixer."""
    yield "embedding.weight", tensors("model.embed_tokens.weight")
    for i, kind in enumerate(config.layers):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        yield f"{ours}mixer_norm.weight", tensors(f"{theirs}operator_norm.weight")
        parts = convolution if kind == "conv" else _attention
        for name, tensor in parts(tensors, theirs, config.mixers[kind]):
            yield f"{ours}mixer.{name}", tensor
        yield f"{ours}mlp_norm.weight", tensors(f"{theirs}ffn_norm.weight")
        for name, tensor in second(tensors, theirs, i):
            yield f"{ours}mlp.{name}", tensor
    yield "norm.weight", tensors("model.embedding_norm.weight")
    yield from head(tensors, config.tie_word_embeddings)


def convolution(
    tensors: Tensors, layer: str, table: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a gated short convolution."""
    for part in ("weight", "bias") if table["bias"] else ("weight",):
        taps = tensors(f"{layer}conv.conv.{part}")
        yield f"conv_{part}", taps[:, 0] if part == "weight" else taps
        for name in ("in_proj", "out_proj"):
            yield f"{name}.{part}", tensors(f"{layer}conv.{name}.{part}")


def mlp(tensors: Tensors, layer: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a gated MLP, whose gate is w1 and whose output w2."""
    own = f"{layer}feed_forward."
    yield "gate_up_proj.weight", stacked(tensors, f"{own}w1.weight", f"{own}w3.weight")
    yield "down_proj.weight", tensors(f"{own}w2.weight")


def _attention(tensors: Tensors, layer: str, _: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of attention."""
    own = f"{layer}self_attn."
    yield "qkv_proj.weight", stacked(tensors, *(f"{own}{n}_proj.weight" for n in "qkv"))
    yield "q_norm.weight", tensors(f"{own}q_layernorm.weight")
    yield "k_norm.weight", tensors(f"{own}k_layernorm.weight")
    yield "out_proj.weight", tensors(f"{own}out_proj.weight")
