"""Non-linear recurrence with one state a channel: the simple (Elman) recurrent network.

Equation:

    z_t = f(a * z_{t-1} + u_t)      elementwise, a ``[D]``
    z_t = f(z_{t-1} W + u_t)        full, W ``[D, D]``

Glossary: u input; z state and output; a, W recurrent weight; f the activation, one of identity,
tanh, relu and sigmoid.

This runs sequentially, in training too: T dependent steps, O(T) time however many cores there are,
since no parallel form of a non-linear recurrence is known. (One exists for the identity with
elementwise a: the scan of the `diagonal` recurrence with N = 1. Use that one.) So there is no
chunked form: the torch loop serves every device, but for elementwise a on a GPU, where a kernel
walks through time with the states in registers.

Source: Elman 1990, "Finding structure in time", Cognitive Science 14(2), the network of figure 2;
elementwise: Li et al. 2018, "Independently recurrent neural network", arXiv:1803.04831, eq. 2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgelin.recurrences.arguments import Arguments
from edgelin.recurrences.chunks import outside_autocast
from edgelin.recurrences.lengths import last
from edgelin.recurrences.operator import Operator
from edgelin.recurrences.rnn import reference

ACTIVATIONS = tuple(reference.ACTIVATIONS)
_ARGUMENTS = Arguments(("state",), u="BTD", weight="D|DD", state="RD")


def rnn(
    u: Tensor, weight: Tensor, state: Tensor, lengths: Tensor | None = None, *, activation: str
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a stretch of tokens, of any length from 1, one after the other.

    Args:
        u: Inputs ``[B, T, D]``, float32 or bfloat16 (float64 on CPU).
        weight: a ``[D]`` or W ``[D, D]``, float32.
        state: State before the first token ``[B, D]``, float32.
        lengths: Steps that each row really has ``[B]``, or None: all; see
            :mod:`edgelin.recurrences.lengths`.
        activation: f, one of ``ACTIVATIONS``.

    Returns:
        ``(z, state)``: outputs ``[B, T, D]`` in the dtype of ``u``, the state after the last token.
    """
    _ARGUMENTS.check(None, u=u, weight=weight, state=state, lengths=lengths)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    z, after = _rnn(u, weight, state, activation)
    if lengths is None:
        return z, after
    states = torch.cat([state[:, None], z.to(state.dtype)], dim=1)  # every state is an output
    return z, last(states, lengths, 1)[:, 0]


def _forward(u: Tensor, weight: Tensor, state: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Kernel for elementwise weights on CUDA tensors, the loop elsewhere."""
    if u.is_cuda and weight.dim() == 1:
        from edgelin.recurrences.rnn import kernel

        return kernel.forward(u, weight, state, activation)
    with outside_autocast(u.device.type):
        return _loop(activation, u, weight, state)


def _backward(
    u: Tensor, weight: Tensor, state: Tensor, activation: str, dz: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of u, weight and state; recomputes all states."""
    if u.is_cuda and weight.dim() == 1:
        from edgelin.recurrences.rnn import kernel_backward

        return kernel_backward.backward(u, weight, state, activation, dz, dstate)
    with outside_autocast(u.device.type):
        # torch.func: below the dispatcher's autograd keys, torch.autograd would record nothing.
        pull: Any = torch.func.vjp(partial(_loop, activation), u, weight, state)[1]
        du, dweight, dinitial = (grad.contiguous() for grad in pull((dz, dstate)))
    return du, dweight, dinitial


def _loop(activation: str, u: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The sequential form, outputs in the dtype of u."""
    z, after = reference.forward(u, weight, state, activation)
    return z.to(u.dtype), after.clone()  # an operator's outputs share no memory


_rnn = Operator("rnn", _forward, _backward, outputs=("u", "state"))
