"""What models of flash-linear-attention (fla) have in common: layers that are attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.common import stacked
from edgelin.families.reading import Fields, Tensors

# Kernels, losses and lengths, which do not change what a model computes.
HARMLESS = (
    "attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_swiglu", "use_l2warp",
)  # fmt: skip


def attention_tables(fields: Fields, hidden_size: int, count: int) -> dict[int, dict[str, Any]]:
    """The layers that ``attn`` makes softmax attention, each with the table of our mixer.

    Args:
        fields: Of the config; ``attn`` is nothing, a table, or a list of tables.
        hidden_size: Width of the stream.
        count: Layers of the model.

    Raises:
        EdgelinError: A layer is out of range or named twice.
    """
    given = fields.take("attn", None) or []
    found: dict[int, dict[str, Any]] = {}
    for values in given if isinstance(given, list) else [given]:
        own = Fields(values, f"{fields.where}: attn")
        heads = own.take("num_heads")
        table = {
            "type": "attention",
            "num_heads": heads,
            "num_kv_heads": own.take("num_kv_heads", heads),
            "head_dim": hidden_size // heads,
            "window": own.take("window_size", 0),
            "rope_theta": float(own.take("rope_theta", 10000.0)),
            "bias": own.take("qkv_bias", False),
        }
        for layer in own.take("layers"):
            if layer in found or not 0 <= layer < count:
                raise EdgelinError(
                    f"{own.where}: layers has {layer} twice, or outside 0..{count - 1}"
                )
            found[layer] = table
        own.finish()
    return found


def layers_of(
    tables: Sequence[dict[str, Any]],
) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """A name for every layer, and the tables by name: equal ones once."""
    mixers: dict[str, dict[str, Any]] = {}
    names = []
    for table in tables:
        name = next((name for name, known in mixers.items() if known == table), None)
        if name is None:
            name = table["type"] if table["type"] not in mixers else f"mixer{len(mixers)}"
            mixers[name] = table
        names.append(name)
    return tuple(names), mixers


def attention(tensors: Tensors, prefix: str, table: Mapping[str, Any]) -> Iterator[Any]:
    """Parameters of such a layer."""
    for kind in ("weight", "bias") if table["bias"] else ("weight",):
        rows = stacked(tensors, *(f"{prefix}{name}_proj.{kind}" for name in "qkv"))
        yield f"qkv_proj.{kind}", rows
    yield "out_proj.weight", tensors(f"{prefix}o_proj.weight")


def named(prefix: str, pairs: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same parameters with the name of the module that holds them before their own."""
    for name, tensor in pairs:
        yield f"{prefix}.{name}", tensor


__all__ = ["HARMLESS", "attention", "attention_tables", "layers_of", "named"]
