"""The stream of RWKV models in the layouts of fla, transformers and the authors' ``.pth`` files.

A layer is a time mixing and a channel mixing, each behind a LayerNorm; the embedding has one too.
The layouts have the same numbers under other names; matrices that the authors multiply from the
right are transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgelin.families.common import head
from edgelin.families.fla_common import HARMLESS, named
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

Parameters = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Layout:
    """Names of one layout: of tensors, and of modules in a layer."""

    embedding: str
    layers: str
    mixer: str
    channel_mix: str
    norms: tuple[str, str, str]  # of the embedding, before the mixer, before the channel mix
    last_norm: str
    head: str


FLA = Layout(
    "model.embeddings.weight", "model.layers", "attn", "ffn",
    ("pre_norm", "attn_norm", "ffn_norm"), "model.norm", "lm_head.weight",
)  # fmt: skip
TRANSFORMERS = Layout(
    "rwkv.embeddings.weight", "rwkv.blocks", "attention", "feed_forward",
    ("pre_ln", "ln1", "ln2"), "rwkv.ln_out", "head.weight",
)  # fmt: skip
ORIGINAL = Layout(
    "emb.weight", "blocks", "att", "ffn", ("ln0", "ln1", "ln2"), "ln_out", "head.weight"
)


def layout(tensors: Tensors) -> Layout:
    """Which names the tensors have."""
    return next((x for x in (ORIGINAL, TRANSFORMERS) if tensors.has(x.embedding)), FLA)


def is_original(tensors: Tensors) -> bool:
    """Whether the tensors have the authors' names."""
    return layout(tensors) is ORIGINAL


def describe(tensors: Tensors) -> dict[str, Any]:
    """Keys of fla's config that the shapes in a ``.pth`` file tell of any RWKV model."""
    vocabulary, hidden = tensors("emb.weight").shape
    layers = {name.split(".")[1] for name in tensors.names if name.startswith("blocks.")}
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": len(layers),
        "intermediate_size": tensors("blocks.0.ffn.key.weight").shape[0],
        "norm_eps": 1e-5,
        "group_norm_eps": 64e-5,  # whatever the width of a head
    }


def stream(
    fields: Fields, mixers: dict[str, dict[str, Any]], layers: tuple[str, ...], *, ratio: float
) -> ModelConfig:
    """The model around the mixers.

    Args:
        fields: Of the config.
        mixers: Tables of the layers; the channel mix, ``ffn``, gets its width here.
        layers: The name of a table for every layer.
        ratio: The family's width of the channel mix in units of the stream.
    """
    hidden = fields.take("hidden_size")
    ratio = fields.take("hidden_ratio", ratio)
    width = fields.take("intermediate_size", 32 * -(-int(hidden * ratio) // 32))
    mixers["ffn"] = {"type": "channel_mix", "intermediate_size": width, **mixers["ffn"]}
    fields.expect("hidden_act", "sqrelu")
    fields.ignore(*HARMLESS)
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=0,
        layers=layers,
        mixers=mixers,
        mlps=("ffn",) * len(layers),
        norm="layer",
        embedding_norm=fields.take("norm_first", True),
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=fields.take("norm_eps", 1e-5),
    )


def weights(
    tensors: Tensors,
    config: ModelConfig,
    mixer: Callable[[Tensors, str, int], Parameters],
    channel_mix: Callable[[Tensors, str], Parameters],
    *,
    bias: bool,
) -> Parameters:
    """Our parameters in order.

    Args:
        tensors: Of the checkpoint.
        config: The model.
        mixer: Gives the parameters of a mixer from the prefix of its names and its layer.
        channel_mix: The same of the channel mix.
        bias: Whether the norms of the stream have one.
    """
    names = layout(tensors)
    before, first, second = names.norms
    yield "embedding.weight", tensors(names.embedding)
    if config.embedding_norm:
        yield from named("embedding_norm", _norm(tensors, f"{names.layers}.0.{before}", bias))
    for i in range(len(config.layers)):
        theirs, ours = f"{names.layers}.{i}", f"blocks.{i}"
        yield from named(f"{ours}.mixer_norm", _norm(tensors, f"{theirs}.{first}", bias))
        yield from named(f"{ours}.mixer", mixer(tensors, f"{theirs}.{names.mixer}.", i))
        yield from named(f"{ours}.mlp_norm", _norm(tensors, f"{theirs}.{second}", bias))
        mix = channel_mix(tensors, f"{theirs}.{names.channel_mix}.")
        yield from named(f"{ours}.mlp", mix)
    yield from named("norm", _norm(tensors, names.last_norm, bias))
    tied = config.tie_word_embeddings
    yield from head(tensors, tied, name=names.head, embedding=names.embedding)


def _norm(tensors: Tensors, name: str, bias: bool) -> Parameters:
    """A LayerNorm, with a bias of zeros where the published one has none."""
    weight = tensors(f"{name}.weight")
    yield "weight", weight
    yield "bias", tensors(f"{name}.bias") if bias else torch.zeros_like(weight)


def rows(tensors: Tensors, prefix: str, *names: str) -> Tensor:
    """Vectors of any shape as the rows of a matrix."""
    return torch.stack([tensors(f"{prefix}{name}").flatten() for name in names])


def renamed(tensors: Tensors, prefix: str, names: Mapping[str, str]) -> Parameters:
    """Matrices and norms that only have other names."""
    for ours, theirs in names.items():
        yield ours, tensors(f"{prefix}{theirs}")


__all__ = ["describe", "is_original", "renamed", "rows", "stream", "weights"]
