"""Diagonal recurrence: S4D, LRU, HGRN and other state-space layers with a diagonal transition.

Equation, per channel d with N states:

    h_t = Λ_t h_{t-1} + b_t x_t
    y_t = Re(sum_n c_{t,n} h_{t,n})         Λ_t = exp(g_t + i theta_t)

Glossary: x input, one number a channel; h state ``[D, N]``; Λ diagonal transition with log
magnitude g <= 0 and angle theta (None: Λ, b, c and h are real); b, c input and output weights.
Each of Λ, b and c is constant (one ``[D, N]``) or selective (one a token, for all channels
``[B, T, 1, N]`` or for each ``[B, T, D, N]``). Complex b, c and h carry a last axis of 2: real and
imaginary part, as ``torch.view_as_real`` writes them.

Sources: Gu et al. 2022, "On the parameterization and initialization of diagonal state space
models" (S4D), arXiv:2206.11893, equations 2 to 4; Orvieto et al. 2023, "Resurrecting recurrent
neural networks for long sequences" (LRU), arXiv:2303.06349, equation 6; Gu and Dao 2023, "Mamba",
arXiv:2312.00752, equation 2 (selective).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from edgelin.recurrences import packed
from edgelin.recurrences.arguments import Arguments
from edgelin.recurrences.diagonal import chunked
from edgelin.recurrences.lengths import masked
from edgelin.recurrences.operator import Operator

_PRECISE = ("g", "theta", "state")
_REAL = Arguments(_PRECISE, x="BTD", b="DN|BTdN", c="DN|BTdN", g="DN|BTdN", state="RDN")
_COMPLEX = Arguments(
    _PRECISE, x="BTD", b="DN2|BTdN2", c="DN2|BTdN2", g="DN|BTdN", theta="DN|BTdN", state="RDN2"
)


def diagonal(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    theta: Tensor | None,
    state: Tensor,
    lengths: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the diagonal recurrence over a stretch of tokens, of any length from 1.

    Args:
        x: Inputs ``[B, T, D]``, float32 or bfloat16 (float64 on CPU).
        b: Input weights ``[D, N]`` or ``[B, T, D or 1, N]``; complex: one more axis of 2.
        c: Output weights, likewise.
        g: Log magnitude of Λ ``[D, N]`` or ``[B, T, D or 1, N]``, float32; below -90 it counts
            as -90.
        theta: Angle of Λ in the shape of ``g``, or None: everything is real.
        state: State before the first token ``[B, D, N]``, complex ``[B, D, N, 2]``, float32.
        lengths: Steps that each row really has ``[B]``, or None: all; see
            :mod:`edgelin.recurrences.lengths`. A constant Λ then costs as much as a selective one.
        cu_seqlens: Ends of sequences packed one after the other into the only row
            ``[sequences + 1]``, ``state`` then has a row for each. None: every row is one sequence.
            See :mod:`edgelin.recurrences.packed`.

    Returns:
        ``(y, state)``: outputs ``[B, T, D]`` in the dtype of ``x``, the state after the last
        token. A skip connection from x to y is the caller's.

    Raises:
        ValueError: Tensors do not fit together; see :mod:`edgelin.recurrences.arguments`.
    """
    arguments = _REAL if theta is None else _COMPLEX
    arguments.check(cu_seqlens, x=x, b=b, c=c, g=g, theta=theta, state=state, lengths=lengths)
    if theta is not None and theta.shape != g.shape:
        raise ValueError(f"theta is {tuple(theta.shape)}, need the shape of g, {tuple(g.shape)}")
    if cu_seqlens is not None:
        return _packed(x, (b, c, g, theta), state, cu_seqlens, lengths)
    if lengths is not None:
        x, g = masked(x, lengths), _ended(g, lengths, x)
        theta = None if theta is None else _ended(theta, lengths, x)
    y, after = _diagonal(x, b, c, g, theta, state)
    return y, after


def _packed(
    x: Tensor,
    weights: tuple[Any, ...],
    state: Tensor,
    cu_seqlens: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run it over packed sequences; constant weights are those of every group."""
    selective = [None if w is None or w.dim() < 4 else w for w in weights]

    def call(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """A selective Λ of g = 0 behind the end is 1 already, which a constant one is not."""
        *mine, state, lengths = rest
        b, c, g, theta = (w if s is None else s for w, s in zip(weights, mine, strict=True))
        return diagonal(x, b, c, g, theta, state, lengths if mine[2] is None else None)

    return packed.run(call, (x, *selective), state, cu_seqlens, lengths)


def _ended(weight: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
    """g or theta, a token, with a Λ of 1 behind the end of every row."""
    if weight.dim() == 2:
        weight = weight.expand(*x.shape[:2], *weight.shape)
    return masked(weight, lengths)


def _forward(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Kernel on CUDA tensors, chunked form elsewhere, which keeps nothing."""
    if x.is_cuda:
        from edgelin.recurrences.diagonal import kernel

        return kernel.forward(x, b, c, g, theta, state)
    return *chunked.forward(x, b, c, g, theta, state), []


def _allocate(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None, state: Tensor
) -> list[Tensor]:
    """Memory for what is kept."""
    if x.is_cuda:
        from edgelin.recurrences.diagonal import kernel

        return kernel.allocate(x, b, c, g, theta, state)
    return []


def _backward(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    theta: Tensor | None,
    state: Tensor,
    dy: Tensor,
    dstate: Tensor,
    kept: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the six inputs (empty for a theta of None).

    Where ``kept`` is empty, all but the inputs is computed again.
    """
    if x.is_cuda:
        from edgelin.recurrences.diagonal import kernel_backward

        return kernel_backward.backward(x, b, c, g, theta, state, dy, dstate, kept)
    return chunked.backward(x, b, c, g, theta, state, dy, dstate)


_diagonal = Operator("diagonal", _forward, _backward, ("x", "state"), _allocate)
