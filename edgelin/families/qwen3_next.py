"""Qwen3-Next (``qwen3_next``: 80B-A3B): the layers of Qwen3.5, with other rows.

``in_proj_qkvz`` holds, key head by key head, the rows of its query, its key, and the values and
output gates of the value heads that it serves; ``in_proj_ba`` those of beta and of the decay.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from edgelin.families.qwen3_5 import deltanet_core, sizes, weights
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("qwen3_next",)
SKIP = r"^mtp\."


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    config = sizes(fields)
    return config, lambda tensors: weights(tensors, config, _deltanet)


def _deltanet(tensors: Tensors, layer: str, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a Gated DeltaNet."""
    own, table = f"{layer}linear_attn.", config.mixers["deltanet"]
    heads = table["num_key_heads"]
    served = table["num_heads"] // heads
    values = served * table["value_dim"]
    for name, theirs, parts in (
        ("qkv_gate_proj", "in_proj_qkvz", [table["key_dim"]] * 2 + [values] * 2),
        ("beta_decay_proj", "in_proj_ba", [served] * 2),
    ):
        by_head = tensors(f"{own}{theirs}.weight").unflatten(0, (heads, -1)).split(parts, dim=1)
        yield f"{name}.weight", torch.cat([part.flatten(0, 1) for part in by_head])
    yield from deltanet_core(tensors, own)
