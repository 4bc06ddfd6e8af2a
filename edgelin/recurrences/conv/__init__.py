"""Short causal depthwise convolution with its tail carried as a state.

    y_t[c] = act(bias[c] + sum_{i=0}^{W-1} weight[c, i] x_{t-W+1+i}[c])

x_s for s < 1 comes from the state, which holds the last W - 1 inputs, oldest first. Used before
the recurrence by H3, Mamba and (Gated) DeltaNet: Yang et al., "Gated Delta Networks" (2024),
arXiv:2412.06464, section 3.4.

Glossary: W taps (``weight.shape[1]``), C channels.

There is no Triton form: the torch form is a sum of W shifted products that ``torch.compile`` fuses
into one kernel. The custom op ``edgelin::short_convolution`` exists for the exporter only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from edgelin.recurrences import packed
from edgelin.recurrences.arguments import Arguments
from edgelin.recurrences.exporting import is_exporting
from edgelin.recurrences.lengths import last

ACTIVATIONS = (None, "silu")
_ARGUMENTS = Arguments(("state",), x="BTC", weight="CW", bias="C", state="RCL")


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    lengths: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve every channel with its own taps, causally, over time.

    Args:
        x: `[B, T, C]` inputs, float32 or bfloat16 (float64 on CPU), as weight and bias.
        weight: `[C, W]` taps; the last one meets the newest input.
        bias: `[C]`, or None.
        state: `[B, C, W - 1]` float32 inputs before ``x``, oldest first.
        lengths: Steps that each row really has `[B]`, or None: all; see
            :mod:`edgelin.recurrences.lengths`.
        activation: None or ``"silu"``.
        cu_seqlens: Ends of N sequences packed one after the other into the only row ``[N + 1]``,
            ``state`` then has N rows. None: every row is one sequence. See
            :mod:`edgelin.recurrences.packed`.

    Returns:
        y: `[B, T, C]` in ``x.dtype``.
        state: `[B, C, W - 1]`, the last W - 1 inputs.

    Raises:
        ValueError: Tensors do not fit together; see :mod:`edgelin.recurrences.arguments`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {ACTIVATIONS}")
    _ARGUMENTS.check(cu_seqlens, x=x, weight=weight, bias=bias, state=state, lengths=lengths)
    if not is_exporting() and state.shape[2] != weight.shape[1] - 1:
        raise ValueError(f"state holds {state.shape[2]} inputs, need W - 1 = {weight.shape[1] - 1}")
    if cu_seqlens is not None:

        def call(x: Tensor, state: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
            return short_convolution(x, weight, bias, state, lengths, activation=activation)

        return packed.run(call, (x,), state, cu_seqlens, lengths)
    if is_exporting():
        y, tail = torch.ops.edgelin.short_convolution(x, weight, bias, state, activation or "none")
    else:
        y, tail = _shifted_products(x, weight, bias, state, activation)
    if lengths is not None:
        history = torch.cat([state.transpose(1, 2), x.to(state.dtype)], dim=1)
        tail = last(history, lengths, state.shape[2]).transpose(1, 2)
    return y, tail


def _shifted_products(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None
) -> tuple[Tensor, Tensor]:
    """The torch form: W products of shifted views, summed in float32."""
    time = x.shape[1]
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    history = torch.cat([state.transpose(1, 2).to(x.dtype), x], dim=1)
    y = history[:, :time] * weight[:, 0]
    for i in range(1, weight.shape[1]):
        y = y + history[:, i : i + time] * weight[:, i]
    if bias is not None:
        y = y + bias
    if activation == "silu":
        y = F.silu(y)
    tail = history[:, time:].transpose(1, 2).to(state.dtype)
    return y.to(x.dtype), tail.contiguous()


@torch.library.custom_op("edgelin::short_convolution", mutates_args=())
def _op(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    y, tail = _shifted_products(
        x, weight, bias, state, None if activation == "none" else activation
    )
    return y.contiguous(), tail.clone()


@_op.register_fake
def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


__all__ = ["short_convolution"]
