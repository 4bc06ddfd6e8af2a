"""What the configs and weights of several families have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.reading import Fields, Tensors


def layer_types(fields: Fields, words: Mapping[str, str], default: Sequence[str]) -> list[str]:
    """The kind of every layer from ``layer_types``.

    Args:
        fields: Of the config; ``num_hidden_layers`` is taken too.
        words: What a layer may be called, and how we call it.
        default: Our names where there are no ``layer_types``.

    Raises:
        EdgelinError: A word that the family does not know, or not a word a layer.
    """
    found = fields.take("layer_types", None)
    names = list(default) if found is None else [words.get(word, "") for word in found]
    if not all(names):
        word = found[names.index("")]
        raise EdgelinError(
            f"{fields.where}: layer_types has {word!r}; supported: {', '.join(map(repr, words))}"
        )
    count = fields.take("num_hidden_layers")
    if len(names) != count:
        raise EdgelinError(
            f"{fields.where}: layer_types has {len(names)} words for num_hidden_layers = {count}"
        )
    return names


def rope(
    fields: Fields, head_dim: int, *, theta: float = 10000.0, partial: float = 1.0
) -> dict[str, Any]:
    """Rotation as options of our attention, from ``rope_parameters`` or the older keys.

    Args:
        fields: Of the config; ``rope_parameters`` is a flat table there.
        head_dim: Width of a head.
        theta: The family's base where the config has none.
        partial: The family's share of a head that is rotated.

    Raises:
        EdgelinError: The frequencies are scaled.
    """
    theta = fields.take("rope_theta", theta)
    partial = fields.take("partial_rotary_factor", partial)
    for name in ("rope_scaling", "rope_parameters"):
        if not fields.has(name):
            continue
        inner = fields.nested(name)
        inner.expect("rope_type", "default")
        inner.expect("type", "default")
        theta = inner.take("rope_theta", theta)
        partial = inner.take("partial_rotary_factor", partial)
        inner.finish()
    return {"rope_theta": float(theta), "rotary_dim": int(head_dim * partial)}


def stacked(tensors: Tensors, *names: str) -> Tensor:
    """Several tensors as the rows of one."""
    return torch.cat([tensors(name) for name in names])


def head(
    tensors: Tensors, tied: bool, *, name: str = "lm_head.weight"
) -> Iterator[tuple[str, Tensor]]:
    """The head's weight, unless it is the embedding's, of which a file may hold a copy."""
    if not tied:
        yield "head.weight", tensors(name)
    elif tensors.has(name):
        tensors.ignore(name)


__all__ = ["head", "layer_types", "rope", "stacked"]
