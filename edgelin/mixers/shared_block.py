"""A block of attention and an MLP that several layers share, each with adapters of its own.

    a_t = attention(RMSNorm([x_t, e_t]))
    y_t = W_out MLP(RMSNorm(a_t))

e_t is the token's embedding, what the first layer reads. There is no residual inside: the block is
meant for a side branch (``model.sides``), whose output a mixer reads beside the stream. Layers with
equal tables have one set of weights, but for W_out and the adapters, and states of their own:
"blocks in turn" are tables that differ in ``number``. An adapter makes of a projection W

    W u + B A u

with A of few rows: of the MLP's first projection, and with ``attention_adapter`` of queries, keys
and values too, each with its own A.

Sources: Glorioso et al. 2024, "Zamba", arXiv:2405.16712, section 2 (the block, the embedding beside
the stream); Glorioso et al. 2024, "The Zamba2 Suite", arXiv:2411.15242, section 2 (blocks in turn,
adapters); Hu et al. 2021, "LoRA", arXiv:2106.09685, equation 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edgelin import mixers
from edgelin.errors import EdgelinError
from edgelin.layers import RMSNorm
from edgelin.mixers import attention, check_sizes, mlp
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config:
    """The parts.

    Args:
        attention: Table of a mixer of type ``attention``.
        mlp: Table of a mixer of type ``mlp``.
        adapter_rank: Rows of every A; 0: no adapters.
        attention_adapter: Whether queries, keys and values have adapters too.
        number: Tells blocks apart that are otherwise alike.
    """

    attention: dict[str, Any]
    mlp: dict[str, Any]
    adapter_rank: int = 0
    attention_adapter: bool = False
    number: int = 0

    def __post_init__(self) -> None:
        check_sizes(self, "adapter_rank", "number", least=0)
        for name, own, kind in zip(
            ("attention", "mlp"), self.configs(), (attention.Config, mlp.Config), strict=True
        ):
            if not isinstance(own, kind):
                found = getattr(self, name)["type"]
                raise EdgelinError(f"{name} is of type {found!r}; it needs the type {name!r}")
        if self.attention_adapter and not self.adapter_rank:
            raise EdgelinError("attention_adapter needs adapter_rank above 0; set one of them")

    def configs(self) -> tuple[Any, Any]:
        """The ``Config`` of both parts."""
        own = (("attention", self.attention), ("mlp", self.mlp))
        found = [mixers.read_config(table, where=name)[1] for name, table in own]
        return found[0], found[1]

    @property
    def export_obstacle(self) -> str | None:
        """Why a mixer of these sizes can't be exported; None: it can."""
        obstacle: str | None = self.configs()[0].export_obstacle
        return obstacle


class Adapted(nn.Module):
    """W u + B A u: a projection that layers may share, and a narrow one of the layer.

    Args:
        shared: W.
        rank: Rows of every A.
        sizes: Outputs that have an A of their own; their sum is that of W.
    """

    def __init__(self, shared: nn.Linear, rank: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.shared = shared
        self.inner = nn.Linear(shared.in_features, rank * len(sizes), bias=False)
        self.outer = nn.ModuleList(nn.Linear(rank, size, bias=False) for size in sizes)

    def forward(self, u: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        parts = self.inner(u).chunk(len(self.outer), dim=-1)
        own = [outer(part) for outer, part in zip(self.outer, parts, strict=True)]
        y: Tensor = self.shared(u) + torch.cat(own, dim=-1)
        return y


class Mixer(nn.Module):
    """Shared block.

    Args:
        config: The parts.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Of the norms.
    """

    needs_position = True
    shares = True

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, width = config, 2 * hidden_size
        own, after = config.configs()
        self.mixer_norm = RMSNorm(width, norm_eps)
        self.mixer = attention.Mixer(own, width, layer, norm_eps, output_size=hidden_size)
        self.mlp_norm = RMSNorm(hidden_size, norm_eps)
        self.mlp = mlp.Mixer(after, hidden_size, layer, norm_eps)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if config.adapter_rank:
            name = "gate_up_proj" if after.gated else "up_proj"
            self._adapt(self.mlp, name, [getattr(self.mlp, name).out_features])
        if config.attention_adapter:
            heads = (own.num_heads, own.num_kv_heads, own.num_kv_heads, own.num_heads * own.gate)
            self._adapt(self.mixer, "qkv_proj", [n * own.head_dim for n in heads if n])

    def _adapt(self, part: nn.Module, name: str, sizes: Sequence[int]) -> None:
        """Give a projection adapters."""
        setattr(part, name, Adapted(getattr(part, name), self.config.adapter_rank, sizes))

    def follow(self, earlier: Sequence[nn.Module]) -> None:
        """Take the weights of the first block with the same table, if there is one."""
        for other in earlier:
            if isinstance(other, Mixer) and other.config == self.config:
                self.mixer_norm, self.mlp_norm = other.mixer_norm, other.mlp_norm
                _take(self.mixer, other.mixer)
                _take(self.mlp, other.mlp)
                return

    def state_specs(self) -> list[StateSpec]:
        """Those of attention."""
        return self.mixer.state_specs()

    def forward(
        self,
        x: Tensor,
        state: dict[str, Tensor],
        position: Tensor,
        shared: dict[str, Tensor],
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        both = torch.cat([x, shared["embedding"]], dim=-1)
        y, state = self.mixer(self.mixer_norm(both), state, position, lengths)
        y, _ = self.mlp(self.mlp_norm(y), {}, position)
        return self.out_proj(y), state


def _take(own: nn.Module, other: nn.Module) -> None:
    """Modules of another block in the place of a block's own, but for its adapters."""
    for name, module in other.named_children():
        if isinstance(module, Adapted):
            getattr(own, name).shared = module.shared
        else:
            setattr(own, name, module)


__all__ = ["Config", "Mixer"]
