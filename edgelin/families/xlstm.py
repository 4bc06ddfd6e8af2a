"""xLSTM (``xlstm``: xLSTM-7b): mLSTM layers, each before a gated MLP; gates and logits are capped.

Widths are shares of ``embedding_dim``: those of keys and values are cut to whole numbers, that of
the MLP is rounded up to a multiple. Projections are stored one by one or together, as
``weight_mode`` says. Where there are biases the norms before the branches have one too; it is
folded into the biases of the projections that read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.common import head, stacked
from edgelin.families.fla_common import named
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("xlstm",)
# Projections as they are stored one by one, and together.
_Names = tuple[tuple[str, ...], tuple[str, ...]]
_QKV_GATE: _Names = (("q", "k", "v", "ogate_preact"), ("qkv_opreact",))
_GATES: _Names = (("igate_preact", "fgate_preact"), ("ifgate_preact",))
_GATE_UP: _Names = (("proj_up_gate", "proj_up"), ("proj_up_gate_z",))


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    _check(fields)
    hidden = _either(fields, "embedding_dim", "hidden_size")
    count = _either(fields, "num_blocks", "num_hidden_layers")
    bias, eps = fields.take("use_bias", False), fields.take("norm_eps", 1e-6)
    fields.expect("cell_norm_eps", eps)
    multiple = fields.take("ffn_round_up_to_multiple_of", 64)
    width = hidden * fields.take("ffn_proj_factor", 2.667)
    width = int((width + multiple - 1) // multiple) * multiple
    mixers = {"mlstm": _mlstm(fields, hidden, bias)}
    if bias:
        mixers["mlp"] = {"type": "mlp", "intermediate_size": width, "bias": True}
    no_cap = fields.is_null("output_logit_soft_cap")
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=0 if bias else width,
        layers=("mlstm",) * count,
        mlps=("mlp",) * count if bias else (),
        mixers=mixers,
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=False,
        rms_norm_eps=eps,
        logit_softcap=float(fields.take("output_logit_soft_cap", 0.0 if no_cap else 30.0)),
    )
    fields.expect("weight_mode", "single", "fused")
    together = fields.take("weight_mode", "single") == "fused"
    return config, lambda tensors: _weights(tensors, config, bias, together)


def _check(fields: Fields) -> None:
    """Refuse what is not computed, and name what changes no number.

    Raises:
        EdgelinError: With the key.
    """
    fields.expect("tie_word_embeddings", False)
    fields.expect("add_out_norm", True)
    fields.expect("add_post_blocks_norm", True)
    fields.expect("add_post_norm", False)
    fields.expect("add_qk_norm", False)
    if fields.is_null("gate_soft_cap"):
        raise EdgelinError(f"{fields.where}: gate_soft_cap is null; supported: a number")
    fields.ignore(  # forms of the computation, precisions, initial values
        "mode", "chunk_size", "chunkwise_kernel", "sequence_kernel", "step_kernel",
        "return_last_states", "max_inference_chunksize", "forward_backend_name",
        "step_backend_name", "add_forward_backend_padding", "autocast_kernel_dtype",
        "inference_state_dtype", "norm_reduction_force_float32", "igate_bias_init_range",
    )  # fmt: skip


def _either(fields: Fields, *names: str) -> int:
    """The value of a key with two names, which must agree."""
    value: int = fields.first(*names)
    for name in names:
        fields.expect(name, value)
    return value


def _mlstm(fields: Fields, hidden: int, bias: bool) -> dict[str, Any]:
    """The mixer's table.

    Raises:
        EdgelinError: Keys or values do not divide among the heads.
    """
    heads = fields.take("num_heads", 8)
    widths = {}
    for ours, name, default in (
        ("key_dim", "qk_dim_factor", 0.5),
        ("value_dim", "v_dim_factor", 1),
    ):
        width = int(hidden * fields.take(name, default))
        if width % heads:
            raise EdgelinError(
                f"{fields.where}: {name} makes {width} numbers, which num_heads = {heads} does "
                f"not divide"
            )
        widths[ours] = width // heads
    fields.expect("head_dim", widths["value_dim"])
    fields.ignore("mlstm_round_up_to_multiple_of")  # the published class cuts, and never rounds
    return {
        "type": "mlstm",
        "num_heads": heads,
        **widths,
        "gate_softcap": float(fields.take("gate_soft_cap", 15.0)),
        "bias": bias,
        "eps": fields.take("eps", 1e-6),
    }


def _weights(
    tensors: Tensors, config: ModelConfig, bias: bool, together: bool
) -> Iterator[tuple[str, Tensor]]:
    """Our parameters in order."""
    yield "embedding.weight", tensors("backbone.embeddings.weight")
    for i in range(len(config.layers)):
        theirs, ours = f"backbone.blocks.{i}.", f"blocks.{i}."
        for branch, norm, parts in (("mixer", "norm_mlstm", _mixer), ("mlp", "norm_ffn", _mlp)):
            yield f"{ours}{branch}_norm.weight", tensors(f"{theirs}{norm}.weight")
            shift = tensors.full(f"{theirs}{norm}.bias") if bias else None
            yield from named(f"{ours}{branch}", parts(tensors, theirs, shift, together))
    yield "norm.weight", tensors("backbone.out_norm.weight")
    yield from head(tensors, config.tie_word_embeddings)


def _mixer(
    tensors: Tensors, layer: str, shift: Tensor | None, together: bool
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of mLSTM, whose gates have a bias in any case."""
    own, bias = f"{layer}mlstm_layer.", shift is not None
    inward = _inward(tensors, own, _QKV_GATE, shift, bias=bias, together=together)
    yield from named("qkv_gate_proj", inward)
    inward = _inward(tensors, own, _GATES, shift, bias=True, together=together)
    yield from named("beta_decay_proj", inward)
    norm = tensors(f"{own}multihead_norm.weight")
    yield "norm.weight", norm
    yield "norm.bias", tensors(f"{own}multihead_norm.bias") if bias else torch.zeros_like(norm)
    yield from named("out_proj", _outward(tensors, f"{own}out_proj.", bias))


def _mlp(
    tensors: Tensors, layer: str, shift: Tensor | None, together: bool
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the MLP."""
    own, bias = f"{layer}ffn.", shift is not None
    inward = _inward(tensors, own, _GATE_UP, shift, bias=bias, together=together)
    yield from named("gate_up_proj", inward)
    yield from named("down_proj", _outward(tensors, f"{own}proj_down.", bias))


def _inward(
    tensors: Tensors,
    own: str,
    names: _Names,
    shift: Tensor | None,
    *,
    bias: bool,
    together: bool,
) -> Iterator[tuple[str, Tensor]]:
    """A projection of what a norm gives, whose bias ``shift`` goes into its own."""
    each = names[together]
    weight = stacked(tensors, *(f"{own}{name}.weight" for name in each))
    yield "weight", weight
    if bias:
        found = stacked(tensors, *(f"{own}{name}.bias" for name in each))
        yield "bias", found if shift is None else found.float() + weight.float() @ shift


def _outward(tensors: Tensors, own: str, bias: bool) -> Iterator[tuple[str, Tensor]]:
    """A projection back into the stream."""
    for part in ("weight", "bias") if bias else ("weight",):
        yield part, tensors(f"{own}{part}")
