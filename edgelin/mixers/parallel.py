"""Several mixers that read one input and whose outputs are added.

    y_t = sum_i part_i(x)_t

Source: Zuo et al. 2025, "Falcon-H1", arXiv:2507.22448, section 2 (Mamba-2 beside attention). Each
part keeps its own states, of different kinds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edgelin import mixers
from edgelin.errors import EdgelinError
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config:
    """The parts.

    Args:
        parts: Tables of mixers, as in ``model.mixers``.
    """

    parts: tuple[dict[str, Any], ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise EdgelinError("parts is empty; give the tables of at least one mixer")
        self.configs()

    def configs(self) -> list[Any]:
        """The ``Config`` of every part."""
        return [
            mixers.read_config(table, where=f"parts[{i}]")[1] for i, table in enumerate(self.parts)
        ]

    @property
    def export_obstacle(self) -> str | None:
        """Why a mixer of these parts can't be exported; None: it can."""
        obstacles = (getattr(config, "export_obstacle", None) for config in self.configs())
        return next(filter(None, obstacles), None)


class Mixer(nn.Module):
    """Mixers side by side.

    Args:
        config: The parts.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Of the parts.

    Raises:
        EdgelinError: Two parts have a state of one name, or a part shares tensors with other
            layers.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config = config
        self.parts: Any = nn.ModuleList(
            mixers.build(table, hidden_size, layer, norm_eps, where=f"parts[{i}]")
            for i, table in enumerate(config.parts)
        )
        for part, table in zip(self.parts, config.parts, strict=True):
            if getattr(part, "shares", False):
                raise EdgelinError(
                    f"a mixer of type {table['type']!r} shares tensors with other layers and "
                    f"can't be one of the parts; make it a layer of its own"
                )
        names = [spec.name for spec in self.state_specs()]
        if len(set(names)) < len(names):
            kinds = ", ".join(repr(table["type"]) for table in config.parts)
            raise EdgelinError(
                f"two of the parts {kinds} have states of one kind; give them layers of their own"
            )

    @property
    def needs_position(self) -> bool:
        """Whether a part asks for the number of tokens already seen."""
        return any(getattr(part, "needs_position", False) for part in self.parts)

    def reset_parameters(self) -> None:
        """Initial values of the parts that have their own."""
        for part in self.parts:
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()

    def step_form(self) -> nn.Module:
        """The parts in the forms that are exported, in place."""
        for i, part in enumerate(self.parts):
            if hasattr(part, "step_form"):
                self.parts[i] = part.step_form()
        return self

    def state_specs(self) -> list[StateSpec]:
        """The states of all parts."""
        return [spec for part in self.parts for spec in part.state_specs()]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        outputs: list[Tensor] = []
        after: dict[str, Tensor] = {}
        for part in self.parts:
            own = {spec.name: state[spec.name] for spec in part.state_specs()}
            y, own = part(x, own, position, lengths)
            outputs.append(y)
            after |= own
        return functools.reduce(torch.add, outputs), after
