"""Gated DeltaNet: a delta rule whose memory also decays.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T
    o_t = S_t^T q_t / sqrt(K)
    g_t = -exp(A_log) softplus(a_t + dt_bias) ;  beta_t = sigmoid(b_t)

q, k, v pass a short convolution and silu; q and k are L2-normalised; the output is a gated RMSNorm.
A key head may serve several value heads, and beta may reach 2, so that a key can be mirrored.
Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), arXiv:2412.06464, eq. 10 and
section 3.4; decay parameters as in Mamba-2 (Dao and Gu 2024, arXiv:2405.21060); beta up to 2:
Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues" (2024),
arXiv:2411.12537, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.initial import step_bias
from edgelin.layers import (
    GatedRMSNorm,
    at_least_float32,
    l2_norm,
    project_aligned,
    project_in_parts,
)
from edgelin.mixers import HeadSizes, check_sizes
from edgelin.recurrences.conv import short_convolution
from edgelin.recurrences.delta import delta
from edgelin.state import StateSpec


@dataclass(frozen=True)
class DeltaSizes(HeadSizes):
    """Sizes of every mixer with this delta rule.

    Args:
        conv_size: Taps of the short convolution, at least 2.
        num_key_heads: Heads of q and k, which divide ``num_heads``: each serves as many value heads
            in a row; None: ``num_heads``.
        allow_neg_eigval: Whether beta lies in 0..2 instead of 0..1.
        norm_eps: Added to the mean square in the output norm; None: the model's.
    """

    conv_size: int = 4
    num_key_heads: int | None = None
    allow_neg_eigval: bool = False
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "conv_size", least=2)
        if self.num_heads % self.key_heads:
            raise EdgelinError(
                f"num_heads is {self.num_heads}, no multiple of num_key_heads = "
                f"{self.num_key_heads}; give a multiple"
            )
        if self.norm_eps is not None and not 0 < self.norm_eps < 1:
            raise EdgelinError(f"norm_eps is {self.norm_eps}; it must be above 0 and below 1")

    @property
    def key_heads(self) -> int:
        """Heads of q and k."""
        return self.num_key_heads or self.num_heads


@dataclass(frozen=True)
class Config(DeltaSizes):
    """Sizes of the mixer.

    Args:
        output_gate: Whether the output norm is gated.
    """

    output_gate: bool = True


class Mixer(nn.Module):
    """Gated DeltaNet (``decays``), or DeltaNet without the decay; KDA puts in its own gates.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Added to the mean square in the output norm.
    """

    decays = True
    config: Any  # of the type of the module's Config

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.key_size = config.key_heads * config.key_dim
        self.value_size = config.num_heads * config.value_dim
        self.conv_channels = 2 * self.key_size + self.value_size
        self.gate_size = self._gate_size()
        self.qkv_gate_proj = nn.Linear(hidden_size, self.conv_channels + self.gate_size, bias=False)
        bound = config.conv_size**-0.5
        self.conv_weight = nn.Parameter(
            torch.empty(self.conv_channels, config.conv_size).uniform_(-bound, bound)
        )
        self._add_gates(hidden_size, config.norm_eps or norm_eps)
        self.out_proj = nn.Linear(self.value_size, hidden_size, bias=False)

    def _gate_size(self) -> int:
        """Columns of the output gate in ``qkv_gate_proj``."""
        return self.value_size if self.config.output_gate else 0

    def _add_gates(self, hidden_size: int, norm_eps: float) -> None:
        """Parameters of :meth:`_gates` and :meth:`_gated_norm`."""
        heads = self.config.num_heads
        self.beta_decay_proj = nn.Linear(hidden_size, heads * (1 + self.decays), bias=False)
        if self.decays:
            self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
            self.dt_bias = nn.Parameter(step_bias(heads))
        self.norm: nn.Module = GatedRMSNorm(self.config.value_dim, norm_eps)

    def state_specs(self) -> list[StateSpec]:
        """The convolution's tail and S."""
        c = self.config
        return [
            StateSpec(
                "conv", self.layer, (self.conv_channels, c.conv_size - 1), "batch channels time"
            ),
            c.matrix_spec(self.layer),
        ]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        c = self.config
        conv_name, recurrent_name = f"conv.{self.layer}", f"recurrent.{self.layer}"
        if self.gate_size:
            sizes = [self.conv_channels, self.gate_size]
            qkv, gate = project_in_parts(self.qkv_gate_proj, x, sizes)
        else:
            qkv, gate = self.qkv_gate_proj(x), None
        qkv, conv = short_convolution(
            qkv, self.conv_weight, None, state[conv_name], lengths, activation="silu"
        )
        qk, v = qkv.split([2 * self.key_size, self.value_size], dim=-1)
        # Queries and keys are normalised together: one node in the exported graph.
        q, k = l2_norm(qk.unflatten(-1, (2 * c.key_heads, c.key_dim))).chunk(2, dim=2)
        v = v.unflatten(-1, (c.num_heads, c.value_dim))
        beta, g = self._gates(x)
        scale = c.key_dim**-0.5
        o, recurrent = delta(q, k, v, beta, g, state[recurrent_name], scale=scale, lengths=lengths)
        return self.out_proj(self._gated_norm(o, gate).flatten(-2)), {
            conv_name: conv,
            recurrent_name: recurrent,
        }

    def _gated_norm(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """The outputs `[B, T, H, V]`, normalised and gated."""
        y: Tensor = self.norm(o, None if gate is None else gate.unflatten(-1, o.shape[-2:]))
        return y

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Beta and log decay, both `[B, T, H]` float32."""
        gates = at_least_float32(project_aligned(self.beta_decay_proj, x))
        if not self.decays:
            return self._beta(gates), None
        beta, a = gates.chunk(2, dim=-1)
        rate = at_least_float32(self.A_log).exp()
        return self._beta(beta), -rate * F.softplus(a + at_least_float32(self.dt_bias))

    def _beta(self, x: Tensor) -> Tensor:
        """The writing strength."""
        return 2 * x.sigmoid() if self.config.allow_neg_eigval else x.sigmoid()
