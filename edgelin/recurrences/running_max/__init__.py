"""Running maximum: the scale at which a memory with exponential input gates is kept finite.

A memory S_t = exp(g_t) S_{t-1} + exp(x_t) w_t overflows where x is large. Its largest exponent so
far, itself decaying, is

    m_t = max(m_{t-1} + g_t, x_t)

and exp(-m_t) S_t obeys the same equation with a log decay g_t + m_{t-1} - m_t and an input gate
exp(x_t - m_t), whose exponents are never positive. So mLSTM runs on the `linear` recurrence and the
WKV of RWKV-4 on the `diagonal` one; m is a state, and their quotients do not depend on it.

Glossary: x exponent that a token brings; g log decay <= 0; m running maximum; C channels (heads of
mLSTM, channels of RWKV-4).

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867,
section 3 (without decay); Beck et al. 2024, "xLSTM", arXiv:2405.04517, equations 15 to 17.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgelin.recurrences.arguments import Arguments
from edgelin.recurrences.lengths import last
from edgelin.recurrences.running_max import scan

_ARGUMENTS = Arguments(("x", "g", "state"), x="BTC", g="BTC", state="RC")


def running_max(
    x: Tensor, g: Tensor, state: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a sequence, of any length from 1.

    Args:
        x: Exponents ``[B, T, C]``, float32 (float64 on CPU).
        g: Log decay <= 0 ``[B, T, C]``, in the dtype of ``x``; finite, and without a floor.
        state: m before the first token ``[B, C]``, likewise; finite.
        lengths: Steps that each row really has ``[B]``, or None: all; see
            :mod:`edgelin.recurrences.lengths`.

    Returns:
        ``(m, state)``: m ``[B, T, C]``, never below ``x``, and m after the last token.
    """
    _ARGUMENTS.check(None, x=x, g=g, state=state, lengths=lengths)
    result: tuple[Tensor, Tensor] = torch.ops.edgelin.running_max(x, g, state)
    if lengths is None:
        return result
    m = torch.cat([state[:, None], result[0]], dim=1)  # every state is an output
    return result[0], last(m, lengths, 1)[:, 0]


def stabilised(
    x: Tensor, g: Tensor, state: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a memory with input gates exp(x) needs: gates and decays of exp(-m_t) S_t.

    Args:
        x: As in :func:`running_max`.
        g: As there.
        state: As there.
        lengths: As there; the memory must get them too.

    Returns:
        ``(gate, decay, m, state)``: input gates exp(x_t - m_t) in 0..1, log decays
        g_t + m_{t-1} - m_t <= 0 and m, all ``[B, T, C]``, and m after the last token.
    """
    m, after = running_max(x, g, state, lengths)
    before = torch.cat([state[:, None], m], dim=1)[:, :-1]
    # Where the old maximum stays the decay is 0, but for rounding to either side.
    decay = (g + before - m).clamp(max=0)
    return (x - m).exp(), decay, m, after


@torch.library.custom_op("edgelin::running_max", mutates_args=())
def _running_max(x: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The scan, on every device."""
    m = scan.forward(x, g, state)
    return m, m[:, -1].clone()


@_running_max.register_fake
def _(x: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), state.new_empty(state.shape)


@torch.library.custom_op("edgelin::running_max_backward", mutates_args=())
def _running_max_backward(
    x: Tensor, m: Tensor, dm: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, g and state."""
    return scan.backward(x, m, dm, dstate)


@_running_max_backward.register_fake
def _(x: Tensor, m: Tensor, dm: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), dstate.new_empty(dstate.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what tells which of the two was the larger."""
    ctx.save_for_backward(inputs[0], output[0])


def _gradients(ctx: Any, dm: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the three inputs."""
    grads: tuple[Tensor, ...] = torch.ops.edgelin.running_max_backward(
        *ctx.saved_tensors, dm, dstate
    )
    return grads


_running_max.register_autograd(_gradients, setup_context=_save)
