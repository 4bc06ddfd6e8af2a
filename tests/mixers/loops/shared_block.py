"""Loop of the mixer ``shared_block``: the loops of its attention and of its MLP, one after another.

The token's embedding, which a mixer alone has not, is the stream with its channels reversed then.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from loops import attention, mlp
from loops.common import EPS, Arrays, linear, matrix

_WINDOW = {"type": "attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "window": 70}
_MLP = {"type": "mlp", "intermediate_size": 9, "activation": "gelu", "bias": True}
_RELU2 = {"type": "mlp", "intermediate_size": 9, "activation": "relu2", "gated": False}
CASES: dict[str, dict[str, Any]] = {
    name: {"type": "shared_block", **table}
    for name, table in {
        "shared block": {"attention": _WINDOW, "mlp": _RELU2, "adapter_rank": 3},
        "shared block, all tokens": {
            "attention": {**_WINDOW, "window": 0, "gate": True, "rotary_dim": 0},
            "mlp": _MLP,
            "adapter_rank": 3,
            "attention_adapter": True,
        },
        "shared block, no adapters": {"attention": _WINDOW, "mlp": _MLP},
    }.items()
}


def embedding_of(x: Any) -> Any:
    """What stands for the embedding of a stream, of numpy's or torch's."""
    return x[..., ::-1] if isinstance(x, np.ndarray) else x.flip(-1)


def loop(
    m: Any, x: np.ndarray, state: Arrays, position: np.ndarray, embedding: np.ndarray | None = None
) -> Any:
    both = [x, embedding_of(x) if embedding is None else embedding]
    read = _normed(m, "mixer_norm", np.concatenate(both, axis=-1))
    y, after = attention.loop(_merged(m.mixer), read, state, position)
    y, _ = mlp.loop(_merged(m.mlp), _normed(m, "mlp_norm", y), {}, position)
    return linear(m, "out_proj", y), after


def _normed(m: Any, name: str, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * matrix(m, f"{name}.weight")


def _merged(m: Any) -> Any:
    """A part with its adapters added to the matrices that they adapt."""
    own = {name: p.detach().double() for name, p in m.named_parameters()}
    merged = {name.replace(".shared.", "."): tensor for name, tensor in own.items()}
    for name in [n for n in own if n.endswith(".inner.weight")]:
        stem = name.removesuffix(".inner.weight")
        outer = [tensor for n, tensor in own.items() if n.startswith(f"{stem}.outer.")]
        added = [b @ a for b, a in zip(outer, own[name].chunk(len(outer)), strict=True)]
        merged[f"{stem}.weight"] = own[f"{stem}.shared.weight"] + torch.cat(added)
    return SimpleNamespace(config=m.config, named_parameters=lambda: merged.items())
