"""Layers that are no mixer: norms, projections in parts, token shift, rotary position.

Norms and angles are computed in float32 or better, whatever the dtype of the stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.recurrences.exporting import is_exporting
from edgelin.recurrences.lengths import last

# A tensor, because torch's exporter stores a Python number in float32 beside float64 operands.
_TURN = torch.tensor(2 * math.pi, dtype=torch.float64)
_FARTHEST = 1e4  # standard deviations
_COLUMNS = 8  # of bfloat16 are 16 bytes, on which rows start in the fast matrix products of GPUs


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or unchanged where it is float64 already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, eq. 4).

    Args:
        size: Length of the last axis.
        eps: Added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]`; the dtype stays."""
        full = at_least_float32(x)
        weight = self.weight.to(full.dtype)
        return F.rms_norm(full, (self.size,), weight, self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMSNorm(x) * silu(gate): what linear mixers put between the recurrence and ``out_proj``.

    Without a gate it is the norm alone.

    Args:
        size: Length of the last axis (one head's values).
        eps: Added to the mean square.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps)

    def forward(self, x: Tensor, gate: Tensor | None) -> Tensor:
        """Normalise and gate `[..., size]`; ``gate`` has the shape of ``x``."""
        y: Tensor = self.norm(x)
        return y if gate is None else y * F.silu(gate)


class GroupedGatedRMSNorm(nn.Module):
    """RMSNorm(x * silu(gate)) in groups: the gate comes before the norm, as in Mamba-2.

    Source: Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060, section 7.1.

    Args:
        size: Length of the last axis.
        groups: Equal parts of it, each with a mean square of its own; the weight is `[size]`.
        eps: Added to the mean square.
        gate_first: False: RMSNorm(x) * silu(gate), the gate after the norm.
    """

    def __init__(self, size: int, groups: int, eps: float, *, gate_first: bool = True) -> None:
        super().__init__()
        self.groups, self.width, self.eps = groups, size // groups, eps
        self.gate_first = gate_first
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Gate and normalise `[..., size]`; ``gate`` has the shape of ``x``; its dtype stays."""
        full, gated = at_least_float32(x), F.silu(at_least_float32(gate))
        y = self._normalised(full * gated) if self.gate_first else self._normalised(full) * gated
        return y.to(x.dtype)

    def _normalised(self, x: Tensor) -> Tensor:
        """The norm with its weight."""
        weight = self.weight.to(x.dtype)
        if self.groups == 1:
            return F.rms_norm(x, (self.width,), weight, self.eps)
        parts = x.unflatten(-1, (self.groups, self.width))
        unit = F.rms_norm(parts, (self.width,), torch.ones_like(weight[: self.width]), self.eps)
        return unit.flatten(-2) * weight


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis (Ba et al. 2016, eq. 4).

    Args:
        size: Length of the last axis.
        eps: Added to the variance.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]`; the dtype stays."""
        full = at_least_float32(x)
        weight, bias = (p.to(full.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(full, (self.size,), weight, bias, self.eps).to(x.dtype)


class HeadLayerNorm(nn.Module):
    """LayerNorm of each head, weight and bias a channel: GroupNorm with a group a head.

    y = (x - mean) / sqrt(var + eps) * weight + bias (Wu and He 2018, arXiv:1803.08494, eq. 1).

    Args:
        heads: Number of heads.
        size: Length of the last axis, one head's values.
        eps: Added to the variance.
    """

    def __init__(self, heads: int, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(heads * size))
        self.bias = nn.Parameter(torch.zeros(heads * size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., heads, size]` and join the heads: `[..., heads * size]`."""
        full = at_least_float32(x)
        y = F.layer_norm(full, (self.size,), eps=self.eps).flatten(-2)
        y = y * self.weight.to(full.dtype) + self.bias.to(full.dtype)
        return y.to(x.dtype)


class FeatureProjection(nn.Module):
    """Features into the stream: proj(z), z = (x - mean) * scale within -10,000 .. 10,000.

    ``mean`` and ``scale`` are those of the training data, so that a model reads raw measurements.
    What is so many deviations away is a broken sensor's: beyond 1e19 a norm would square it into
    infinity, and the whole step would silently count as zeros.

    Args:
        size: Features F of a step.
        hidden_size: Width of the stream.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, size: int, hidden_size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self.proj = nn.Linear(size, hidden_size)

    def reset_parameters(self) -> None:
        """Normalised features make a stream of unit variance."""
        nn.init.normal_(self.proj.weight, std=self.proj.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., F]` to `[..., hidden_size]`."""
        z = (x - self.mean) * self.scale
        y: Tensor = self.proj(z.clamp(-_FARTHEST, _FARTHEST))
        return y


def project_in_parts(projection: nn.Module, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """``projection(x).split(sizes, dim=-1)``, on a GPU as a product for each part.

    The parts of one product are strided: kernels of recurrences copy them first, and the backward
    pass joins their gradients in one more tensor of all columns before it multiplies. Products of
    their own give contiguous parts and take each gradient where it is. Elsewhere, and in exported
    graphs, it is one product: weights are read once, by one node.

    A part whose width is no multiple of 8 is multiplied as in :func:`project_aligned`.

    Args:
        projection: An ``nn.Linear``. What took the place of one (an adapter, quantised weights) or
            has hooks is called as it is.
        x: `[..., in]`.
        sizes: Columns of the parts; their sum is all there are.

    Returns:
        The parts, `[..., size]` each.
    """
    if not (_is_on_gpu(x) and _is_plain(projection)):
        parts: tuple[Tensor, ...] = projection(x).split(sizes, dim=-1)
        return parts
    weight, bias = projection.weight, projection.bias
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    return tuple(map(partial(_aligned, x), weight.split(sizes), biases))


def project_aligned(projection: nn.Module, x: Tensor) -> Tensor:
    """``projection(x)``, for few columns, such as a number a head.

    GPUs multiply bfloat16 several times more slowly where the number of columns is no multiple
    of 8: there, rows of zeros fill the weight up, and the columns they make are cut off.

    Args:
        projection: As in :func:`project_in_parts`.
        x: `[..., in]`.

    Returns:
        `[..., out]`.
    """
    if _is_on_gpu(x) and _is_plain(projection):
        return _aligned(x, projection.weight, projection.bias)
    y: Tensor = projection(x)
    return y


def _aligned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias, by a product of a multiple of 8 columns."""
    columns = len(weight)
    missing = -columns % _COLUMNS
    if not missing:
        return F.linear(x, weight, bias)
    weight = F.pad(weight, (0, 0, 0, missing))
    bias = None if bias is None else F.pad(bias, (0, missing))
    return F.linear(x, weight, bias)[..., :columns]


def _is_on_gpu(x: Tensor) -> bool:
    """Whether the form for GPUs is to be taken."""
    return x.is_cuda and not is_exporting()


def _is_plain(projection: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a call is F.linear, which no library for adapters and the like has changed."""
    if type(projection) is not nn.Linear or "forward" in projection.__dict__:
        return False
    if type(projection.weight) not in (Tensor, nn.Parameter):
        return False
    return not (
        projection._forward_hooks
        or projection._forward_pre_hooks
        or projection._backward_hooks
        or projection._backward_pre_hooks
    )


def running_mean(
    x: Tensor, mean: Tensor, position: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """m_t = m_{t-1} + (x_t - m_{t-1}) / t, the mean over all steps so far.

    Args:
        x: `[B, T, D]`.
        mean: The mean before the first step `[B, D]`.
        position: Steps before the first `[B]` int64.
        lengths: Steps that each row really has `[B]` int64; None: all.

    Returns:
        The mean at every step `[B, T, D]` in the dtype of ``x``, and the last one.
    """
    count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
    full = x.to(mean.dtype)
    # the old mean plus a correction: position times mean would round it away in a long stream
    excess = full.cumsum(1) - count * mean[:, None]
    means = mean[:, None] + excess / (position[:, None, None] + count)
    final = means[:, -1]
    if lengths is not None:
        final = last(torch.cat([mean[:, None], means], dim=1), lengths, 1)[:, 0]
    return means.to(x.dtype), final


def l2_norm(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis, as an RMSNorm (one ONNX node)."""
    size = x.shape[-1]
    full = at_least_float32(x)
    weight = torch.full((size,), size**-0.5, dtype=full.dtype, device=x.device)
    return F.rms_norm(full, (size,), weight, eps / size).to(x.dtype)


def token_shift(x: Tensor, state: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The stream one token late (Peng et al. 2023, "RWKV", arXiv:2305.13048, section 3.1.1).

    Args:
        x: `[B, T, D]`.
        state: The token before the first `[B, D]`.
        lengths: Tokens that each row really has `[B]` int64; None: all.

    Returns:
        The token before each `[B, T, D]` in the dtype of ``x``, and the last token in the dtype of
        ``state``.
    """
    # Joined before it is cut: torch.export would tell lengths T - 1 = 1 from others.
    previous = torch.cat([state[:, None].to(x.dtype), x], dim=1)[:, :-1]
    if lengths is None:
        return previous, x[:, -1].to(state.dtype)
    return previous, last(torch.cat([state[:, None], x.to(state.dtype)], dim=1), lengths, 1)[:, 0]


def rotary_angles(position: Tensor, time: int, frequencies: Tensor) -> Tensor:
    """Angles modulo 2 pi of ``time`` tokens, `[B, T, D / 2]` float64.

    Args:
        position: `[B]` int64, position of the first token of each row.
        time: T.
        frequencies: `[D / 2]` float64, radians a token.
    """
    steps = torch.arange(time, device=position.device, dtype=torch.int64)
    tokens = (position[:, None] + steps).to(torch.float64)
    # float32 angles are off by 0.02 after a million tokens: reduce before any cast.
    return torch.fmod(tokens[:, :, None] * frequencies, _TURN)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the feature pairs (i, i + D/2) of x (Su et al. 2021, arXiv:2104.09864, eq. 34).

    Args:
        x: `[..., D]`, D even.
        angles: `[..., D / 2]` float64, broadcast against half of ``x``.

    Returns:
        The shape and dtype of ``x``.
    """
    angles = angles.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def keep_last(hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Mark where the exported graph may drop all but the last positions; an identity elsewhere.

    With ``lengths`` these are the last ones of every row.
    """
    if is_exporting():
        marked: Tensor = torch.ops.edgelin.keep_last(hidden, lengths)
        return marked
    return hidden


@torch.library.custom_op("edgelin::keep_last", mutates_args=())
def _keep_last(hidden: Tensor, lengths: Tensor | None) -> Tensor:
    return hidden.clone()


@_keep_last.register_fake
def _keep_last_fake(hidden: Tensor, lengths: Tensor | None) -> Tensor:
    return torch.empty_like(hidden)


__all__ = [
    "FeatureProjection",
    "GatedRMSNorm",
    "GroupedGatedRMSNorm",
    "HeadLayerNorm",
    "LayerNorm",
    "RMSNorm",
    "at_least_float32",
    "keep_last",
    "l2_norm",
    "project_aligned",
    "project_in_parts",
    "rotary_angles",
    "rotate",
    "running_mean",
    "token_shift",
]
