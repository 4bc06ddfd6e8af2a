"""Cross-entropy of next tokens without the full logits.

loss = mean_n (logsumexp_v(h_n W_v) - h_n W_{y_n});  dloss/dlogits = (softmax - onehot) / n.

Logits of 64 x 1,024 tokens and 8,192 words are 2 GiB in float32. Here a few thousand rows at a
time are made, turned into their gradient in place, and multiplied out at once, so that the
backward pass has nothing left to do. The idea is Liger's (arXiv:2410.10989, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_ROWS = 8192

Gradient = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, compiled: bool = False
) -> torch.Tensor:
    """Mean cross-entropy in nats of ``softmax(hidden @ weight.T)``.

    Args:
        hidden: ``[..., d]``; multiplied in the autocast type if autocast is on.
        weight: Output embedding ``[vocabulary, d]``.
        targets: ``[...] int64``.
        compiled: Whether the softmax part goes through ``torch.compile``.

    Returns:
        Scalar float32 (float64 for float64 inputs).
    """
    gradient = _compiled_gradient() if compiled else _gradient
    flat = hidden.reshape(-1, hidden.shape[-1])
    apply: Callable[..., torch.Tensor] = _CrossEntropy.apply
    return apply(flat, weight, targets.reshape(-1), gradient)


def _gradient(
    logits: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss of some rows and its gradient times ``scale`` for their logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = functional.log_softmax(logits, -1, dtype=wide)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    hit = columns == targets[:, None]
    loss = -log_p.gather(-1, targets[:, None]).sum()
    return loss, ((log_p.exp() - hit.to(wide)) * scale).to(logits.dtype)


_cache: list[Gradient] = []


def _compiled_gradient() -> Gradient:
    if not _cache:
        _cache.append(torch.compile(_gradient))
    return _cache[0]


class _CrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        gradient: Gradient,
    ) -> torch.Tensor:
        device = hidden.device.type
        dtype = hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            rows, words = hidden.to(dtype), weight.to(dtype)
            loss = torch.zeros((), dtype=wide, device=hidden.device)
            d_hidden = torch.zeros_like(rows)
            d_weight = torch.zeros(weight.shape, dtype=wide, device=hidden.device)
            for start in range(0, len(rows), _ROWS):
                part = rows[start : start + _ROWS]
                goal = targets[start : start + _ROWS]
                part_loss, d_logits = gradient(part @ words.T, goal, 1 / len(rows))
                loss += part_loss
                torch.mm(d_logits, words, out=d_hidden[start : start + _ROWS])
                d_weight += d_logits.T @ part
        ctx.save_for_backward(d_hidden.to(hidden.dtype), d_weight.to(weight.dtype))
        return loss / len(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grads[0], d_weight * grads[0], None, None
