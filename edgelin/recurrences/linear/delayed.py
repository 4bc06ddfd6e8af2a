"""Reading before the write, from a recurrence that reads after it: one token more.

What token t reads before its own decay and write is what token t - 1 left. So with k, v and g one
token late, behind a token that writes nothing, and q followed by one that reads nothing, reading
after gives S_{t-1}^T q_t and the same last state. The GPU kernels, which know no other order, run
this; a second order in them would double what has to be compiled and measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


def forward(
    run: Callable[..., tuple[Any, ...]], inputs: Inputs, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs that read before the write ``[B, T, H, V]``, and the last state.

    Args:
        run: ``chunked.forward`` or a form with its arguments; what it gives beside is dropped.
        inputs: q, k, v and g of ``chunked.forward``.
        state: ``[B, H, K, V]``.
        scale: Factor of the output.
    """
    o, final = run(*_delay(inputs), state, scale)[:2]
    return o[:, :-1].contiguous(), final


def backward(
    run: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
    inputs: Inputs,
    state: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g (empty without g) and the state.

    Args:
        run: Gradients of the form that reads after the write, with the arguments
            (q, k, v, g, state, scale, do, dstate).
        inputs: As in :func:`forward`.
        state: As there.
        scale: As there.
        do: Gradient of the output ``[B, T, H, V]``.
        dstate: Gradient of the last state.
    """
    dq, dk, dv, dg, dinitial = run(*_delay(inputs), state, scale, _end(do), dstate)
    dk, dv = dk[:, 1:].contiguous(), dv[:, 1:].contiguous()
    dg = dg if inputs[3] is None else dg[:, 1:].contiguous()
    return dq[:, :-1].contiguous(), dk, dv, dg, dinitial


def _delay(inputs: Inputs) -> Inputs:
    """q with a token of zeros behind it, the others with one in front."""
    q, k, v, g = inputs
    return _end(q), _start(k), _start(v), None if g is None else _start(g)


def _start(x: Tensor) -> Tensor:
    """A token of zeros before the first."""
    return F.pad(x, (*[0] * (2 * x.dim() - 4), 1, 0))


def _end(x: Tensor) -> Tensor:
    """A token of zeros behind the last."""
    return F.pad(x, (*[0] * (2 * x.dim() - 4), 0, 1))
