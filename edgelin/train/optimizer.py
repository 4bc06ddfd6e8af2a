"""AdamW with decoupled weight decay (arXiv:1711.05101, algorithm 2) and its tensors by name."""

from __future__ import annotations

import torch
from torch import nn

from edgelin.config import OptimConfig


def build(model: nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all parameters; only matrices decay, not norms, biases and other vectors.

    Nor does a matrix whose ``no_weight_decay`` is true: zero is no neutral value for an eigenvalue.
    """
    parameters = list(model.parameters())
    kept = [p for p in parameters if p.ndim < 2 or getattr(p, "no_weight_decay", False)]
    others = set(parameters) - set(kept)
    groups = [
        {"params": [p for p in parameters if p in others], "weight_decay": optim.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        fused=all(p.is_cuda for p in parameters),
    )


def tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's moments and step counts, keyed ``optimizer.<slot>/<parameter>``."""
    return {
        f"optimizer.{slot}/{name}": value
        for name, parameter in model.named_parameters()
        for slot, value in optimizer.state.get(parameter, {}).items()
    }


def restore(
    optimizer: torch.optim.Optimizer, model: nn.Module, values: dict[str, torch.Tensor]
) -> None:
    """Put back what :func:`tensors` gave, each where its parameter is."""
    own = dict(model.named_parameters())
    for key, value in values.items():
        head, _, name = key.partition("/")
        if head.startswith("optimizer."):
            slot = head.removeprefix("optimizer.")
            # AdamW keeps its step count on the CPU unless it is fused.
            stays = slot == "step" and not optimizer.param_groups[0]["fused"]
            optimizer.state[own[name]][slot] = value if stays else value.to(own[name].device)
