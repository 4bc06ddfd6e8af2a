"""Zamba2 (``zamba2``: 1.2B, 2.7B, 7B): Mamba-2 with blocks of attention that several layers share.

Every layer is Mamba-2. Before some ("hybrid") a block of attention and an MLP reads the stream
beside the token's embedding, and what it gives, through a ``linear`` of the layer, is added to what
Mamba-2 reads, not to the stream. There are ``num_mem_blocks`` such blocks, used in turn and stored
once, with the first layer that uses them; each use has adapters (LoRA) of its own, and its own keys
and values. Ours share them too: no copy is made of a block, neither in a checkpoint nor in a graph.

Attention divides by sqrt(D / 2), half the width of a head: the factor is folded into the queries.
The step dt has no bound but ``time_step_limit``; ``time_step_min`` is of the initial values,
although transformers' full pass (not its step) takes it for a bound: with transformers' default
config (time_step_min 0.001) our logits are about 4e-4 from those of its class for that reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.common import head, layer_types, mamba2, rope, scaled, step_limits
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("zamba2",)
SKIP = r"rotary_emb\.inv_freq$"
_WORDS = {"mamba": "mamba", "linear_attention": "mamba", "hybrid": "hybrid"}
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}
_EPS = 1e-5  # of the norm inside Mamba-2, whatever the config says


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    bias, count = fields.take("add_bias_linear", False), fields.take("num_mem_blocks", 1)
    kinds = layer_types(fields, _WORDS, (), key="layers_block_type")
    hybrid = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    fields.expect("hybrid_layer_ids", hybrid)
    fields.expect("rms_norm_eps", _EPS)
    tables, block = {"mamba": _mamba(fields, bias)}, _block(fields, bias)
    tables |= {f"block_{i}": block | {"number": i} for i in range(min(count, len(hybrid)))}
    fields.ignore("use_mem_eff_path", "use_mamba_kernels", "chunk_size")  # forms of computation
    sides = [f"block_{hybrid.index(i) % count}" if i in hybrid else "" for i in range(len(kinds))]
    config = ModelConfig(
        hidden_size=fields.take("hidden_size"),
        intermediate_size=0,
        layers=("mamba",) * len(kinds),
        mixers=tables,
        sides=tuple(sides) if hybrid else (),
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", True),
        rms_norm_eps=_EPS,
    )
    return config, lambda tensors: _weights(tensors, config)


def _mamba(fields: Fields, bias: bool) -> dict[str, Any]:
    """Mamba-2's table."""
    heads = fields.take("n_mamba_heads", 8)
    head_dim = fields.take("mamba_expand", 2) * fields.take("hidden_size") // heads
    fields.expect("mamba_headdim", head_dim)
    fields.expect("use_conv_bias", True)
    fields.ignore("time_step_min", "time_step_max", "time_step_floor")  # initial values
    return {
        "type": "mamba2",
        "num_heads": heads,
        "head_dim": head_dim,
        "state_size": fields.take("mamba_d_state", 64),
        "num_groups": fields.take("mamba_ngroups", 1),
        "conv_size": fields.take("mamba_d_conv", 4),
        "norm": "after_gate",
        "bias": bias,
        "out_bias": bias,
        "conv_bias": True,
        **step_limits(fields),
    }


def _block(fields: Fields, bias: bool) -> dict[str, Any]:
    """The table of a block, but for its number."""
    heads, hidden = fields.take("num_attention_heads", 32), fields.take("hidden_size")
    head_dim, act = 2 * hidden // heads, fields.take("hidden_act", "gelu")
    width = fields.take("intermediate_size", 4 * hidden)
    for name, value in {
        "attention_head_dim": head_dim,
        "attention_hidden_size": 2 * hidden,
        "kv_channels": hidden // heads,
        "num_query_groups": heads,
        "ffn_hidden_size": width,
        "use_shared_mlp_adapter": True,
    }.items():
        fields.expect(name, value)
    fields.expect("hidden_act", *_ACTIVATIONS)
    rotation = rope(fields, head_dim)
    rotates = fields.take("use_mem_rope", False)
    if rotates:
        fields.expect("use_long_context", False)  # scales the frequencies in some versions
    fields.ignore("use_long_context")
    return {
        "type": "shared_block",
        "attention": {
            "type": "attention",
            "num_heads": heads,
            "num_kv_heads": fields.take("num_key_value_heads", heads),
            "head_dim": head_dim,
            "window": 0,
            **(rotation if rotates else {"rotary_dim": 0}),
        },
        "mlp": {
            "type": "mlp",
            "intermediate_size": width,
            "activation": _ACTIVATIONS.get(act, act),
            "bias": bias,
        },
        "adapter_rank": fields.take("adapter_rank", 128),
        "attention_adapter": fields.take("use_shared_attention_adapter", False),
    }


def _weights(tensors: Tensors, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    yield "embedding.weight", tensors("model.embed_tokens.weight")
    first: dict[str, str] = {}  # where a block is stored
    uses = 0
    for i, side in enumerate(config.sides or ("",) * len(config.layers)):
        theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
        inner = f"{theirs}mamba_decoder." if side else theirs
        if side:
            prefix, table = f"{theirs}shared_transformer.", config.mixers[side]
            if side not in first:
                first[side] = prefix
                for name, tensor in _shared(tensors, prefix, table):
                    yield f"{ours}side.{name}", tensor
            elif copies := [name for name in tensors.names if name.startswith(prefix)]:
                _check_copies(tensors, copies, prefix, first[side])
            for name, tensor in _adapters(tensors, first[side], table, uses):
                yield f"{ours}side.{name}", tensor
            yield f"{ours}side.out_proj.weight", tensors(f"{theirs}linear.weight")
            uses += 1
        yield f"{ours}mixer_norm.weight", tensors(f"{inner}input_layernorm.weight")
        for name, tensor in mamba2(tensors, f"{inner}mamba.", config.mixers["mamba"]):
            yield f"{ours}mixer.{name}", tensor
    yield "norm.weight", tensors("model.final_layernorm.weight")
    yield from head(tensors, config.tie_word_embeddings)


def _shared(tensors: Tensors, prefix: str, table: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a block that all its layers have."""
    attention = f"{prefix}self_attn."
    rows = [tensors(f"{attention}{name}_proj.weight") for name in "qkv"]
    own = "qkv_proj.shared" if table["attention_adapter"] else "qkv_proj"
    yield "mixer_norm.weight", tensors(f"{prefix}input_layernorm.weight")
    yield f"mixer.{own}.weight", torch.cat([scaled(rows[0], 2**0.5), *rows[1:]])
    yield "mixer.out_proj.weight", tensors(f"{attention}o_proj.weight")
    yield "mlp_norm.weight", tensors(f"{prefix}pre_ff_layernorm.weight")
    own = "gate_up_proj.shared" if table["adapter_rank"] else "gate_up_proj"
    for name, theirs in ((own, "gate_up_proj"), ("down_proj", "down_proj")):
        for part in ("weight", "bias") if table["mlp"]["bias"] else ("weight",):
            yield f"mlp.{name}.{part}", tensors(f"{prefix}feed_forward.{theirs}.{part}")


def _adapters(
    tensors: Tensors, prefix: str, table: dict[str, Any], use: int
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a layer's adapters: those of this use among all of all blocks."""
    if table["adapter_rank"]:
        stem = f"{prefix}feed_forward.gate_up_proj_adapter_list.{use}."
        yield "mlp.gate_up_proj.inner.weight", tensors(f"{stem}0.weight")
        yield "mlp.gate_up_proj.outer.0.weight", tensors(f"{stem}1.weight")
    if table["attention_adapter"]:
        stems = [f"{prefix}self_attn.linear_{name}_adapter_list.{use}." for name in "qkv"]
        inner = torch.cat([tensors(f"{stem}0.weight") for stem in stems])
        yield "mixer.qkv_proj.inner.weight", inner
        for i, stem in enumerate(stems):
            outer = scaled(tensors(f"{stem}1.weight"), 2**0.5 if i == 0 else 1.0)
            yield f"mixer.qkv_proj.outer.{i}.weight", outer


def _check_copies(tensors: Tensors, names: list[str], prefix: str, first: str) -> None:
    """Refuse a block that is stored again with other values."""
    for name in names:
        original = name.replace(prefix, first, 1)
        if not tensors.has(original) or not torch.equal(tensors(name), tensors(original)):
            raise EdgelinError(
                f"{tensors.where}: {name} is not {original}, though num_mem_blocks makes them one; "
                f"config.json and the weights do not belong together"
            )
