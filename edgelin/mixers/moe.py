"""Mixture of experts: of many MLPs every token passes through the few that a router chooses.

    l_t = W_router x_t
    y_t = sum_{e in C_t} w_te MLP_e(x_t) + s_t MLP_shared(x_t)

    router        scores p_t        chosen C_t              weights w_te
    softmax       softmax(l_t)      k largest of p_t        p_te
    sigmoid       sigmoid(l_t)      k largest of p_t + b    p_te

with ``norm_topk_prob`` divided by their sum over C_t. With ``num_groups`` the experts are in groups
of E / G, and C_t is chosen from the groups in which the two largest p_t + b have the largest sums.
All MLPs are gated with SiLU, or without a gate have the square of ReLU. With ``latent_size`` the
experts read W_in x_t of that width, and W_out brings their sum back. s_t is 1, or sigmoid(W_s x_t)
with ``shared_gate``. Sources: Shazeer et al. 2017, arXiv:1701.06538, equations 1
to 5 (a softmax over the k largest logits is the normalised softmax over all); Dai et al. 2024,
"DeepSeekMoE", arXiv:2401.06066, equation 9 (the shared expert); DeepSeek-AI 2024, "DeepSeek-V3",
arXiv:2412.19437, equations 13 to 16 (the sigmoid, and b that is for the choice only) and section
2.1.2 (groups); NVIDIA 2025, "Nemotron 3", arXiv:2512.20856 (the latent width).

There is no loss that balances the experts, and training does not move b: it is a buffer that a
checkpoint brings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.experts import Experts
from edgelin.layers import at_least_float32
from edgelin.mixers import check_eps, check_sizes, mlp
from edgelin.recurrences.chunks import outside_autocast
from edgelin.state import StateSpec

ROUTERS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Config:
    """Sizes of the branch.

    Args:
        num_experts: Experts E.
        experts_per_token: How many of them compute a token.
        intermediate_size: Width inside an expert.
        router: ``softmax`` or ``sigmoid``: what makes scores of the router's logits.
        norm_topk_prob: Whether the weights of the chosen add up to 1.
        expert_bias: Whether a bias of every expert counts in the choice; ``sigmoid`` only.
        sum_eps: Added to the sum that the weights are divided by; ``sigmoid`` only.
        num_groups: Groups G of experts; divides E. More than one: ``sigmoid`` only.
        groups_per_token: Groups that the experts of a token are chosen from.
        gated: Whether all MLPs are gated with SiLU; else they have the square of ReLU.
        latent_size: Width that the experts read and write; 0: that of the stream.
        bias: Whether the shared MLP and the projections to and from that width have biases.
        shared_size: Width inside an MLP that computes every token; 0: none.
        shared_gate: Whether that MLP has a gate.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    router: str = "softmax"
    norm_topk_prob: bool = True
    expert_bias: bool = False
    sum_eps: float = 1e-6
    num_groups: int = 1
    groups_per_token: int = 1
    gated: bool = True
    latent_size: int = 0
    bias: bool = False
    shared_size: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "num_experts", "experts_per_token", "intermediate_size", "num_groups")
        check_sizes(self, "shared_size", "latent_size", least=0)
        check_eps(self, "sum_eps")
        if self.experts_per_token > self.num_experts:
            raise EdgelinError(
                f"experts_per_token is {self.experts_per_token}; there are only num_experts = "
                f"{self.num_experts}"
            )
        if self.router not in ROUTERS:
            raise EdgelinError(f"router is {self.router!r}; allowed: {', '.join(ROUTERS)}")
        if self.expert_bias and self.router != "sigmoid":
            raise EdgelinError("expert_bias belongs to the router sigmoid; set it to false")
        if self.num_groups > 1:
            self._check_groups()
        if self.shared_gate and not self.shared_size:
            raise EdgelinError("shared_gate needs a shared expert; set shared_size, or it to false")

    def _check_groups(self) -> None:
        """Groups are equal, and those of a token hold enough experts."""
        if self.router != "sigmoid":
            raise EdgelinError("num_groups belongs to the router sigmoid; leave it out")
        size = self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or size < 2:
            raise EdgelinError(
                f"num_groups is {self.num_groups}; give a divisor of num_experts = "
                f"{self.num_experts} that leaves at least 2 in a group"
            )
        least = -(-self.experts_per_token // size)
        if not least <= self.groups_per_token <= self.num_groups:
            raise EdgelinError(
                f"groups_per_token is {self.groups_per_token}; give {least} (enough for "
                f"experts_per_token) to num_groups = {self.num_groups}"
            )


class Mixer(nn.Module):
    """Mixture of experts.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Not used; every mixer takes it.
        norm_eps: Not used; every mixer takes it.
    """

    expert_bias: Tensor

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(hidden_size, config.num_experts, bias=False)
        if config.expert_bias:
            self.register_buffer("expert_bias", torch.zeros(config.num_experts))
        c, width = config, config.latent_size or hidden_size
        self.experts = Experts(c.num_experts, width, c.intermediate_size, gated=c.gated)
        if c.latent_size:
            self.in_proj = nn.Linear(hidden_size, width, bias=c.bias)
            self.out_proj = nn.Linear(width, hidden_size, bias=c.bias)
        if c.shared_size:
            act = "silu" if c.gated else "relu2"
            shared = mlp.Config(c.shared_size, activation=act, gated=c.gated, bias=c.bias)
            self.shared = mlp.Mixer(shared, hidden_size, layer, norm_eps)
        if config.shared_gate:
            self.shared_router = nn.Linear(hidden_size, 1, bias=False)

    def state_specs(self) -> list[StateSpec]:
        """None."""
        return []

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Map `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        # In float32: a rounded logit would send a token to another expert.
        with outside_autocast(x.device.type):
            weights, chosen = self._route(_projected(self.router, x))
        if self.config.latent_size:
            y = self.out_proj(self.experts(self.in_proj(x), chosen, weights))
        else:
            y = self.experts(x, chosen, weights)
        if self.config.shared_size:
            shared, _ = self.shared(x, {}, position)
            if self.config.shared_gate:
                with outside_autocast(x.device.type):
                    gate = _projected(self.shared_router, x).sigmoid()
                shared = (shared * gate).to(x.dtype)
            y = y + shared
        return y, {}

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of every token, `[B, T, k]`."""
        own, count = self.config, self.config.experts_per_token
        if own.router == "softmax":
            if own.norm_topk_prob:
                weights, chosen = logits.topk(count)
                return weights.softmax(-1), chosen
            weights, chosen = logits.softmax(-1).topk(count)
            return weights, chosen
        scores = logits.sigmoid()
        ranks = scores + self.expert_bias if own.expert_bias else scores
        chosen = (self._in_groups(ranks) if own.num_groups > 1 else ranks).topk(count).indices
        weights = scores.gather(-1, chosen)
        if own.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + own.sum_eps)
        return weights, chosen

    def _in_groups(self, ranks: Tensor) -> Tensor:
        """Ranks `[B, T, E]`, -inf outside of the chosen groups."""
        groups = ranks.unflatten(-1, (self.config.num_groups, -1))
        best = groups.topk(2).values.sum(-1).topk(self.config.groups_per_token).indices
        taken = torch.zeros_like(groups[..., 0]).scatter(-1, best, 1.0) > 0
        inside: Tensor = groups.masked_fill(~taken[..., None], -torch.inf).flatten(-2)
        return inside


def _projected(layer: nn.Linear, x: Tensor) -> Tensor:
    """A projection in float32 or better."""
    full = at_least_float32(x)
    return F.linear(full, layer.weight.to(full.dtype))


__all__ = ["Config", "Mixer"]
