"""Experts: MLPs of which every token passes through a few, weighted.

    y_t = sum_{e in C_t} w_te  W^down_e (silu(W^gate_e x_t) * W^up_e x_t)        gated
    y_t = sum_{e in C_t} w_te  W^down_e relu(W^up_e x_t)^2                       else

C_t are the k experts that a router has chosen for token t, w_te >= 0 their weights. Source: Shazeer
et al., "Outrageously Large Neural Networks" (2017), arXiv:1701.06538, equation 1, with the gated
MLP of Shazeer (2020), arXiv:2002.05202, equation 6, or the square of ReLU of So et al. (2021),
arXiv:2109.08668, section 4.

Glossary: E experts, k of a token, H width of the stream, I width inside an expert. The rows of gate
and up alternate in one matrix ``[E, 2 I, H]``, gate first: the order that onnxruntime's kernels
read, so that an exported graph holds the matrices as they are trained. Without a gate there is
``up_proj`` ``[E, I, H]`` in its place.

The torch form goes through the experts that some token chose, one after another; no expert computes
a token that did not choose it, and none has a limit of tokens. The custom op ``edgelin::experts``
exists for the exporter only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.recurrences.exporting import is_exporting


class Experts(nn.Module):
    """The matrices of all experts of a layer.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        gated: Whether they are gated.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, *, gated: bool = True
    ) -> None:
        super().__init__()
        inner, outer = intermediate_size, hidden_size
        self.gated = gated
        if gated:
            self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, outer))
        else:
            self.up_proj = nn.Parameter(torch.empty(num_experts, inner, outer))
        self.down_proj = nn.Parameter(torch.empty(num_experts, outer, inner))
        self.reset_parameters(hidden_size**-0.5, intermediate_size**-0.5)

    def reset_parameters(self, inwards: float, outwards: float) -> None:
        """Normal weights of these standard deviations: of gate and up, and of down."""
        nn.init.normal_(self.inwards, std=inwards)
        nn.init.normal_(self.down_proj, std=outwards)

    @property
    def inwards(self) -> nn.Parameter:
        """What every expert multiplies its input with."""
        return self.gate_up_proj if self.gated else self.up_proj

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts.

        Args:
            x: `[B, T, H]`.
            chosen: `[B, T, k]` int64, no expert twice for a token.
            weights: `[B, T, k]` float32 (or float64), at least 0.

        Returns:
            `[B, T, H]` in the dtype of ``x``.
        """
        form = torch.ops.edgelin.experts if is_exporting() else _one_by_one
        y: Tensor = form(x, chosen, weights, self.inwards, self.down_proj, self.gated)
        return y


def _one_by_one(
    x: Tensor, chosen: Tensor, weights: Tensor, inwards: Tensor, outwards: Tensor, gated: bool
) -> Tensor:
    """The torch form."""
    tokens, chosen, weights = (tensor.flatten(0, 1) for tensor in (x, chosen, weights))
    y = torch.zeros_like(tokens)
    # Cut once: the gradient of an index would be as large as all experts, for each of them.
    into, out = inwards.unbind(), outwards.unbind()
    for expert in chosen.unique().tolist():
        rows, place = torch.nonzero(chosen == expert, as_tuple=True)
        inner = F.linear(tokens[rows], into[expert])
        if gated:
            gate, up = inner.unflatten(-1, (-1, 2)).unbind(-1)
            inner = F.silu(gate) * up
        else:
            inner = F.relu(inner).square()
        part = F.linear(inner, out[expert]) * weights[rows, place, None]
        y = y.index_add(0, rows, part.to(y.dtype))
    return y.view_as(x)


# How many tokens an expert has is known only when they are counted: nothing to compile.
_one_by_one = torch.compiler.disable(_one_by_one)


@torch.library.custom_op("edgelin::experts", mutates_args=())
def _op(
    x: Tensor, chosen: Tensor, weights: Tensor, inwards: Tensor, outwards: Tensor, gated: bool
) -> Tensor:
    y: Tensor = _one_by_one(x, chosen, weights, inwards, outwards, gated)
    return y


@_op.register_fake
def _fake(
    x: Tensor, chosen: Tensor, weights: Tensor, inwards: Tensor, outwards: Tensor, gated: bool
) -> Tensor:
    return torch.empty_like(x)


__all__ = ["Experts"]
