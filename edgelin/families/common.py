"""What the configs and weights of several families have in common."""

from __future__ import annotations

import math
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


def scaled(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """A tensor times a constant, in float32; a factor of 1 leaves it as it is stored."""
    if isinstance(factor, float | int) and factor == 1:
        return tensor
    return tensor.float() * factor


def step_limits(fields: Fields, name: str = "time_step_limit") -> dict[str, Any]:
    """The limits of dt as options of our Mamba-2.

    They are no initial values: ``time_step_min`` and ``time_step_max`` are those, and bound
    nothing in the published models.
    """
    low, high = fields.take(name, (0.0, math.inf))
    return {"min_dt": float(low), "max_dt": None if high == math.inf else float(high)}


def mamba2(
    tensors: Tensors,
    prefix: str,
    table: Mapping[str, Any],
    *,
    inputs: float = 1.0,
    rows: float | Tensor = 1.0,
    outputs: float = 1.0,
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of our Mamba-2 from the layout that all transformers families have.

    ``in_proj`` holds the rows of the gate, of x, B, C and of the step; we keep the step in a
    projection of its own, and its bias in ``dt_bias``.

    Args:
        tensors: Of the checkpoint.
        prefix: Of the mixer's names.
        table: The mixer's table.
        inputs: Factor on what the mixer reads.
        rows: Factor on what ``in_proj`` gives, bias included: a number, or one a row.
        outputs: Factor on what the mixer gives.
    """
    heads = table["num_heads"]
    projection = scaled(tensors(f"{prefix}in_proj.weight"), inputs)
    each = rows[:, None] if isinstance(rows, Tensor) else rows
    projection = scaled(projection, each)
    yield "in_proj.weight", projection[:-heads]
    yield "dt_proj.weight", projection[-heads:]
    step = tensors(f"{prefix}dt_bias")
    if table["bias"]:
        bias = scaled(tensors(f"{prefix}in_proj.bias"), rows)
        yield "in_proj.bias", bias[:-heads]
        step = step.float() + bias[-heads:].float()
    yield "dt_bias", step
    yield "conv_weight", tensors(f"{prefix}conv1d.weight")[:, 0]
    if table["conv_bias"]:
        yield "conv_bias", tensors(f"{prefix}conv1d.bias")
    for name in ("A_log", "D"):
        yield name, tensors(f"{prefix}{name}")
    if table["norm"] != "none":
        yield "norm.weight", tensors(f"{prefix}norm.weight")
    yield "out_proj.weight", scaled(tensors(f"{prefix}out_proj.weight"), outputs)
    if table["out_bias"]:
        yield "out_proj.bias", scaled(tensors(f"{prefix}out_proj.bias"), outputs)


__all__ = ["head", "layer_types", "mamba2", "rope", "scaled", "stacked", "step_limits"]
