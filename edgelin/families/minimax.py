"""MiniMax-Text-01 (``minimax``): lightning attention and softmax attention, each before experts.

What a branch reads is also what it is added to: x = alpha norm(x) + beta branch(norm(x)), with
factors for each kind of branch. They are folded into weights: alpha into the norm and, as a
divisor, into all that reads it; beta into what the branch gives. The decay of lightning attention
follows from the layer and the head: files hold it as ``slope_rate``, which is compared, and as
tables made of it, which are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.common import (
    attention,
    attention_table,
    experts,
    head,
    layer_types,
    rope,
    scaled,
)
from edgelin.families.fla_common import layers_of, named
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("minimax",)
SKIP = r"\.self_attn\.(query|key|diagonal)_decay$"
_LIGHTNING, _SOFTMAX, _EXPERTS = "linear_attn", "full_attn", "mlp"  # as keys of the config begin
_WORDS = {"linear_attention": _LIGHTNING, "full_attention": _SOFTMAX}
_ROUNDING = 2**-7  # of slopes in a file of bfloat16


@dataclass(frozen=True)
class _Factors:
    """What scales a kind of branch: alpha the stream, beta what is added to it."""

    alpha: float
    beta: float


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    fields.expect("hidden_act", "silu", "swish")
    fields.ignore("block_size", "router_aux_loss_coef", "router_jitter_noise")  # form, training
    count = fields.take("num_hidden_layers")
    default = [_LIGHTNING if i % 2 else _SOFTMAX for i in range(count)]
    kinds = layer_types(fields, _WORDS, default)
    softmax = _softmax(fields)
    layers, mixers = layers_of(
        [
            softmax if kind == _SOFTMAX else _lightning(softmax, i, count)
            for i, kind in enumerate(kinds)
        ]
    )
    mixers["moe"] = {
        "type": "moe",
        "num_experts": fields.first("num_local_experts", "num_experts", default=8),
        "experts_per_token": fields.take("num_experts_per_tok", 2),
        "intermediate_size": fields.take("intermediate_size"),
    }
    config = ModelConfig(
        hidden_size=fields.take("hidden_size"),
        intermediate_size=0,
        layers=layers,
        mixers=mixers,
        mlps=("moe",) * count,
        norm_places=("stream",) * count,
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=fields.take("rms_norm_eps", 1e-5),
    )
    found = {kind: _factors(fields, kind) for kind in (_LIGHTNING, _SOFTMAX, _EXPERTS)}
    return config, lambda tensors: _weights(tensors, config, kinds, found)


def _softmax(fields: Fields) -> dict[str, Any]:
    """The table of the attention layers.

    Raises:
        EdgelinError: Only a part of a head is rotated, which published codes do differently.
    """
    table = attention_table(fields)
    size = table["head_dim"]
    rotation = rope(fields, size, theta=1e6)
    rotated = fields.take("rotary_dim", rotation["rotary_dim"])
    if rotated != size:
        raise EdgelinError(
            f"{fields.where}: {rotated} of the {size} numbers of a head are rotated; supported: all"
        )
    return {**table, **rotation, "window": fields.take("sliding_window", 0)}


def _lightning(softmax: Mapping[str, Any], layer: int, count: int) -> dict[str, Any]:
    """The table of a layer of lightning attention, which has the heads of the others."""
    return {
        "type": "lightning_attention",
        "num_heads": softmax["num_heads"],
        "key_dim": softmax["head_dim"],
        "value_dim": softmax["head_dim"],
        "decay_scale": 1 - layer / (count - 1 + 1e-5) + 1e-5,
        "norm_eps": 1e-6,  # whatever that of the other norms
    }


def _factors(fields: Fields, kind: str) -> _Factors:
    """alpha and beta of a kind of branch.

    Raises:
        EdgelinError: alpha is 0, by which no weight can be divided.
    """
    alpha, beta = (fields.take(f"{kind}_{name}_factor", 1.0) for name in ("alpha", "beta"))
    if alpha == 0:
        raise EdgelinError(f"{fields.where}: {kind}_alpha_factor is 0; supported: any other number")
    return _Factors(alpha, beta)


def _weights(
    tensors: Tensors, config: ModelConfig, kinds: list[str], factors: Mapping[str, _Factors]
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    yield "embedding.weight", tensors("model.embed_tokens.weight")
    for i, kind in enumerate(kinds):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        own, table = factors[kind], config.mixers[config.layers[i]]
        norm = scaled(tensors(f"{theirs}input_layernorm.weight"), own.alpha)
        yield f"{ours}mixer_norm.weight", norm
        if kind == _SOFTMAX:
            mixer = attention(
                tensors, f"{theirs}self_attn.", table, inputs=1 / own.alpha, outputs=own.beta
            )
        else:
            mixer = _lightning_weights(tensors, f"{theirs}self_attn.", table, own)
        yield from named(f"{ours}mixer", mixer)
        own = factors[_EXPERTS]
        norm = scaled(tensors(f"{theirs}post_attention_layernorm.weight"), own.alpha)
        yield f"{ours}mlp_norm.weight", norm
        moe = _moe_weights(tensors, theirs, config.mixers["moe"]["num_experts"], own)
        yield from named(f"{ours}mlp", moe)
    yield "norm.weight", tensors("model.norm.weight")
    yield from head(tensors, config.tie_word_embeddings)


def _lightning_weights(
    tensors: Tensors, prefix: str, table: Mapping[str, Any], factors: _Factors
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of lightning attention, whose rows of queries, keys and values alternate."""
    heads, size = table["num_heads"], table["key_dim"]
    _check_slopes(tensors, f"{prefix}slope_rate", heads, table["decay_scale"])
    qkv = tensors(f"{prefix}qkv_proj.weight").unflatten(0, (heads, 3, size))
    rows = torch.cat([qkv.transpose(0, 1).flatten(0, 2), tensors(f"{prefix}output_gate.weight")])
    yield "qkv_gate_proj.weight", scaled(rows, 1 / factors.alpha)
    yield "norm.weight", tensors(f"{prefix}norm.weight")
    yield "out_proj.weight", scaled(tensors(f"{prefix}out_proj.weight"), factors.beta)


def _check_slopes(tensors: Tensors, name: str, heads: int, scale: float) -> None:
    """The rates of decay in the file, if any, are those that the layer and the head say.

    Raises:
        EdgelinError: They are others.
    """
    if not tensors.has(name):
        return
    found = tensors.full(name).flatten()
    wanted = scale * torch.exp2(-8 * torch.arange(1, heads + 1) / heads)
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=_ROUNDING, atol=0):
        raise EdgelinError(
            f"{tensors.where}: {name} is not the decay of a layer of its index and heads; only "
            f"the published rates are supported"
        )


def _moe_weights(
    tensors: Tensors, layer: str, count: int, factors: _Factors
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the experts."""
    own = f"{layer}block_sparse_moe."
    yield "router.weight", scaled(tensors(f"{own}gate.weight"), 1 / factors.alpha)
    for name, tensor in experts(tensors, f"{own}experts.", count, ("w1", "w3", "w2")):
        factor = factors.beta if name == "down_proj" else 1 / factors.alpha
        yield f"experts.{name}", scaled(tensor, factor)
