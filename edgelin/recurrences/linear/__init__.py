"""Linear recurrence: linear attention, retention and gated linear attention.

Equation, per head:

    S_t = exp(g_t) S_{t-1} + k_t v_t^T
    o_t = scale * S_t^T q_t

and, with the normaliser, o_t / (scale * z_t . q_t + eps) where z_t = exp(g_t) z_{t-1} + k_t, or
o_t / (max(|scale * z_t . q_t|, floor_t) + eps) where keys have both signs. With the bonus u a token
reads the state before its own decay and write, and its own value by u:

    o_t = scale * (S_{t-1} + (u * k_t) v_t^T)^T q_t

Glossary: S state ``[K, V]``; q, k queries and keys of width K; v values of width V; g log decay
(none: linear attention; one a head: RetNet, Mamba-2; one a key, multiplying the rows of S: GLA);
z normaliser, the same recurrence with v = 1; u bonus of a token for itself (RWKV-6); exclusive:
reading S_{t-1}.

Sources: Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, equations 16 to 20;
Sun et al. 2023, "Retentive network", arXiv:2307.08621, equation 6; Yang et al. 2024, "Gated linear
attention", arXiv:2312.06635, equation 3; Peng et al. 2024, "Eagle and Finch", arXiv:2404.05892,
section 4 (bonus); Beck et al. 2024, "xLSTM", arXiv:2405.04517, equation 21 (floor).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from edgelin.recurrences import packed, widths
from edgelin.recurrences.arguments import Arguments
from edgelin.recurrences.exporting import is_exporting
from edgelin.recurrences.lengths import masked
from edgelin.recurrences.linear import chunked, delayed, on_gpu
from edgelin.recurrences.operator import Operator

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]  # q, k, v, g, state
_ARGUMENTS = Arguments(
    ("g", "state", "normalizer"), v="BTHV", q="BTHK", k="BTHK", g="BTH|BTHK", state="RHKV",
    bonus="HK", normalizer="RHK", floor="BTH",
)  # fmt: skip


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    *,
    scale: float = 1.0,
    bonus: Tensor | None = None,
    normalizer: Tensor | None = None,
    floor: Tensor | None = None,
    eps: float = 1e-6,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Run the linear recurrence over a sequence, of any length from 1.

    Args:
        q: Queries ``[B, T, H, K]``, float32 or bfloat16 (float64 on CPU).
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, H, V]``.
        g: Log decay <= 0: None, ``[B, T, H]`` or ``[B, T, H, K]``, float32; below -90 it counts
            as -90.
        state: State before the first token ``[B, H, K, V]``, float32.
        scale: Factor of the output.
        bonus: u ``[H, K]``, or None: the output reads the state after the write. Not together with
            a normaliser.
        normalizer: Normaliser z before the first token ``[B, H, K]``, float32, or None.
        floor: Least magnitude of the denominator ``[B, T, H]``, which then counts without its sign;
            only with a normaliser.
        eps: Added to the denominator.
        lengths: Steps that each row really has ``[B]``, or None: all; see
            :mod:`edgelin.recurrences.lengths`.
        cu_seqlens: Ends of N sequences packed one after the other into the only row ``[N + 1]``,
            states then have N rows. None: every row is one sequence. See
            :mod:`edgelin.recurrences.packed`.

    Returns:
        ``(o, state)``, with ``normalizer`` ``(o, state, normalizer)``: ``o`` ``[B, T, H, V]`` in
        the dtype of ``v``, the state and the normaliser after the last token.

    Raises:
        ValueError: Tensors do not fit together; see :mod:`edgelin.recurrences.arguments`.
    """
    _ARGUMENTS.check(
        cu_seqlens, v=v, q=q, k=k, g=g, state=state, bonus=bonus, normalizer=normalizer,
        floor=floor, lengths=lengths,
    )  # fmt: skip
    if bonus is not None and normalizer is not None:
        raise ValueError("bonus and normalizer are both given, need one of them or none")
    if floor is not None and normalizer is None:
        raise ValueError("floor is given without a normalizer, need both or none")
    packed.refuse_both(cu_seqlens, lengths)
    k, g = masked(k, lengths), None if g is None else masked(g, lengths)
    if cu_seqlens is not None and q.is_cuda and bonus is None:
        return _packed(cu_seqlens, (q, k, v, g, state), normalizer, floor, scale, eps)
    if normalizer is not None and cu_seqlens is None and _takes_column(q, k, v, g):
        return on_gpu.run_normalized(q, k, v, g, state, normalizer, floor, scale, eps, None)

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        o, after = _linear(q, k, v, g, state, scale, bonus is not None)
        return o, after

    recur = partial(_within_widths, run)
    if cu_seqlens is not None:
        recur = partial(_padded, recur, cu_seqlens)
    outputs = _divided(recur, (q, k, v, g, state), normalizer, floor, eps)
    if bonus is not None:
        o, state = outputs
        own = scale * (q.to(state.dtype) * bonus.to(state.dtype) * k).sum(-1, keepdim=True)
        return (o + own * v).to(v.dtype), state
    return outputs


def _divided(
    recur: widths.Recurrence,
    inputs: Inputs,
    normalizer: Tensor | None,
    floor: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """Run it, and with a normaliser once more for what it is divided by."""
    q, k, v, g, state = inputs
    o, state = recur(*inputs)
    if normalizer is None:
        return o, state
    ones, z = _one_column(q, k, normalizer)
    sums, z = recur(q, k, ones, g, z)
    sums = sums[..., :1]
    if floor is not None:
        sums = torch.maximum(sums.abs(), floor[..., None])
    return (o / (sums + eps)).to(v.dtype), state, z[..., 0]


def _takes_column(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> bool:
    """Whether kernels take the normaliser along with the rest."""
    fits = k.shape[-1] <= widths.MOST_KEYS and not widths.needs_padding(k, v)
    return q.is_cuda and fits and (g is None or g.dim() == 3) and not is_exporting()


def _one_column(q: Tensor, k: Tensor, normalizer: Tensor) -> tuple[Tensor, Tensor]:
    """Values and state of the normaliser: one column, and where kernels need it zeros beside.

    On a GPU float32 products of bfloat16 keys would leave the tensor cores idle; z stays float32.
    """
    half = q.is_cuda and q.dtype == k.dtype == torch.bfloat16
    width = widths.WIDTH if half else 1
    ones = torch.zeros((*k.shape[:3], width), dtype=k.dtype if half else normalizer.dtype,
                       device=k.device)  # fmt: skip
    ones[..., 0] = 1
    return ones, F.pad(normalizer[..., None], (0, width - 1))


def _within_widths(
    run: widths.Recurrence, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the operator in calls of widths that the kernels take."""
    fitting = partial(widths.run_fitting, run)
    if v.is_cuda and k.shape[-1] > widths.MOST_KEYS:
        return widths.run_by_keys(fitting, q, k, v, g, state)
    return fitting(q, k, v, g, state)


def _packed(
    cu_seqlens: Tensor,
    inputs: Inputs,
    normalizer: Tensor | None,
    floor: Tensor | None,
    scale: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Run it over packed sequences, by kernels that read them as they are."""
    steps = [x for x in (*inputs[:4], floor) if x is not None]
    ends = packed.ends_of(cu_seqlens, steps, [inputs[4]])
    if normalizer is not None and _takes_column(*inputs[:4]):
        return on_gpu.run_normalized(*inputs, normalizer, floor, scale, eps, ends)

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        o, after = on_gpu.run_packed(q, k, v, g, state, scale, ends)
        return o, after

    return _divided(partial(_within_widths, run), inputs, normalizer, floor, eps)


# How many tokens a sequence has is known only when they are counted.
_packed = torch.compiler.disable(_packed, reason="Python reads the lengths of packed sequences")


def _padded(
    recur: widths.Recurrence,
    cu_seqlens: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run it over packed sequences in batches: keys and decays of zero leave a state as it is."""

    def call(*inputs: Any) -> tuple[Tensor, Tensor]:
        return recur(*inputs[:-1])

    return packed.run(call, (q, k, v, g), state, cu_seqlens)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    exclusive: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The recurrence without normaliser and bonus, on the device of its inputs."""
    if q.is_cuda:
        from edgelin.recurrences.linear import kernel

        if exclusive:
            return *delayed.forward(kernel.forward, (q, k, v, g), state, scale), []
        return kernel.forward(q, k, v, g, state, scale)
    o, final = chunked.forward(q, k, v, g, state, scale, exclusive)
    return o.contiguous(), final.contiguous(), []


def _states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    exclusive: bool,
) -> list[Tensor]:
    """Memory for what :func:`_forward` keeps."""
    if exclusive or not q.is_cuda:
        return []
    from edgelin.recurrences.linear import kernel

    return kernel.allocate(q, k, v)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    exclusive: bool,
    do: Tensor,
    dstate: Tensor,
    kept: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g (empty without g) and state; what was not kept is recomputed."""
    if q.is_cuda:
        from edgelin.recurrences.linear import kernel_backward

        run = kernel_backward.backward
        if exclusive:
            return delayed.backward(run, (q, k, v, g), state, scale, do, dstate)
        return run(q, k, v, g, state, scale, do, dstate, kept)
    given = [x for x in (q, k, v, state, g) if x is not None]
    # torch.func: below the dispatcher's autograd keys, torch.autograd would record nothing.
    pull: Any = torch.func.vjp(partial(_chunked, scale, exclusive), *given)[1]
    grads = [grad.contiguous() for grad in pull((do, dstate))]
    dq, dk, dv, dinitial, dg = grads if g is not None else (*grads, torch.zeros(0))
    return dq, dk, dv, dg, dinitial


def _chunked(
    scale: float,
    exclusive: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The chunked form with g last, where it may be absent."""
    return chunked.forward(q, k, v, g, state, scale, exclusive)


_linear = Operator("linear", _forward, _backward, outputs=("v", "state"), allocate=_states)
