"""Research models of flash-linear-attention (fla 0.6.0) that share everything but their mixer.

``gla``, ``retnet``, ``delta_net``, ``gated_deltanet``, ``kda``, ``hgrn2``, ``linear_attn``: a layer
is a mixer (:mod:`edgelin.families.fla_mixers`), or softmax attention where ``attn`` says so, and a
gated MLP, each behind an RMSNorm. The MLP's width is two thirds of ``hidden_ratio`` streams,
rounded up to 256, unless the config has one. Before February 2025 ``gate_proj`` held the rows of
both halves.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from edgelin.families import fla_mixers
from edgelin.families.common import head, stacked
from edgelin.families.fla_common import HARMLESS, attention, attention_tables, layers_of, named
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = tuple(fla_mixers.READERS)
CHECKED = """
    logits beside a float64 model written from the code of fla 0.6.0, whose own classes give
    the same to 3e-5 for 12 tokens (Triton's interpreter)
"""


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    kind = fields.take("model_type")
    hidden, count = fields.take("hidden_size"), fields.take("num_hidden_layers")
    others = attention_tables(fields, hidden, count)
    own = fla_mixers.READERS[kind](fields, hidden)
    layers, mixers = layers_of([others.get(i) or own.table(i) for i in range(count)])
    fields.expect("hidden_act", "swish", "silu")
    fields.expect("attnres_block_size")
    fields.ignore(*HARMLESS, "fuse_norm")
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=_mlp_width(fields, hidden, 2 if kind == "retnet" else 4),
        layers=layers,
        mixers=mixers,
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=fields.take("norm_eps", 1e-6),
    )

    def weights(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        yield "embedding.weight", tensors("model.embeddings.weight")
        for i in range(count):
            theirs, ours = f"model.layers.{i}.", f"blocks.{i}."
            yield f"{ours}mixer_norm.weight", tensors(f"{theirs}attn_norm.weight")
            prefix = f"{theirs}attn."
            mixer = (
                attention(tensors, prefix, others[i])
                if i in others
                else own.weights(tensors, prefix, i)
            )
            yield from named(f"{ours}mixer", mixer)
            yield f"{ours}mlp_norm.weight", tensors(f"{theirs}mlp_norm.weight")
            yield from named(f"{ours}mlp", _mlp(tensors, f"{theirs}mlp."))
        yield "norm.weight", tensors("model.norm.weight")
        yield from head(tensors, config.tie_word_embeddings)

    return config, weights


def _mlp_width(fields: Fields, hidden: int, ratio: int) -> int:
    """Width inside the MLP."""
    ratio = fields.take("hidden_ratio", ratio)
    width: int = fields.take("intermediate_size", 256 * -(-int(hidden * ratio * 2 / 3) // 256))
    return width


def _mlp(tensors: Tensors, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the MLP."""
    names = [f"{prefix}{name}_proj.weight" for name in ("gate", "up")]
    yield "gate_up_proj.weight", stacked(tensors, *filter(tensors.has, names))
    yield "down_proj.weight", tensors(f"{prefix}down_proj.weight")
