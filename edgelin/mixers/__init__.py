"""Token mixers: one ``nn.Module`` a file around a recurrence (or an attention window).

A mixer module has ``Config``, a frozen dataclass read from ``model.mixers.<name>``, and ``Mixer``::

    Mixer(config, hidden_size, layer, norm_eps)
    mixer.state_specs() -> list[StateSpec]
    mixer(x [B, T, d], state, position [B] int64, lengths=None) -> (y [B, T, d], new state)

``state`` is keyed by ``StateSpec.name``. One forward serves training (any T), prefill and decode
(T = 1). ``lengths`` ``[B]`` int64 says how many of the T tokens each row really has; a mixer hands
it to its recurrences, short convolutions and token shifts, which keep what stands behind the end
out of the states (:mod:`edgelin.recurrences.lengths`). ``Mixer.needs_position = True`` asks the
model for the number of tokens already seen; ``Mixer.shares = True`` for one more argument before
``lengths``, a dictionary of tensors that all layers of one call share (``embedding`` is what the
first layer reads; RWKV-7 keeps the values of its first layer there), and for one call of
``follow(earlier)``, the mixers before it, when the model is built: it may take modules of theirs in
the place of its own.

Conventions: the projection back into the residual stream is ``out_proj`` (its initial weights
shrink with depth); projections that make gates of the recurrence have ``beta`` or ``decay`` in
their names (they stay float in quantised graphs); a projection that is cut into parts goes through
:func:`edgelin.layers.project_in_parts`, one of a few columns a head through
:func:`edgelin.layers.project_aligned`, which make training faster on a GPU; an optional
``reset_parameters()`` runs after the model's own initialisation; an optional
``Config.export_obstacle`` says in a line why a mixer of these sizes trains but can't be exported
(None: it can); an optional ``step_form()`` returns the module that is exported in the mixer's
place, with states of its own. A mixer around one matrix ``[H, K, V]`` extends :class:`HeadSizes`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from edgelin.config import ModelConfig, from_dict
from edgelin.errors import EdgelinError
from edgelin.mixer_trial import check_specs, told
from edgelin.state import StateSpec

_MOST_SIZE = 1 << 16  # any product of a few stays below 2^63


def check_sizes(config: Any, *names: str, least: int = 1) -> None:
    """Raise EdgelinError for the first of these fields that is no sensible size."""
    for name in names:
        value = getattr(config, name)
        if value < least:
            raise EdgelinError(f"{name} is {value}; give at least {least}")
        if value > _MOST_SIZE:
            raise EdgelinError(f"{name} is {value}; give at most {_MOST_SIZE}")


def check_eps(config: Any, name: str) -> None:
    """Raise EdgelinError if this field is neither None nor above 0 and below 1."""
    value = getattr(config, name)
    if value is not None and not 0 < value < 1:
        raise EdgelinError(f"{name} is {value}; it must be above 0 and below 1")


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a mixer whose state is a matrix a head; every integer is at least 1.

    Args:
        num_heads: Heads H.
        key_dim: Width K of a query or key, a head.
        value_dim: Width V of a value, a head.
    """

    num_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        check_sizes(self, *(name for name, value in vars(self).items() if type(value) is int))

    def matrix_spec(self, layer: int) -> StateSpec:
        """The matrix S as a state of this layer."""
        shape = (self.num_heads, self.key_dim, self.value_dim)
        return StateSpec("recurrent", layer, shape, "batch heads key value")


def load(type_name: str) -> ModuleType:
    """Import the mixer module of this type: a file here, or ``"package.module"`` anywhere.

    Raises:
        EdgelinError: There is no such module, it does not load, or it makes no mixer.
    """
    path = type_name if "." in type_name else f"{__name__}.{type_name}"
    try:
        module = importlib.import_module(path)
    except Exception as error:  # a module of the user may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (path == missing or path.startswith(missing + ".")):
            known = ", ".join(sorted(m.name for m in pkgutil.iter_modules(__path__)))
            raise EdgelinError(
                f"mixer type {type_name!r} is not known; use one of {known}, "
                "or the dotted path of a module with Config and Mixer"
            ) from None
        raise EdgelinError(f"mixer type {type_name!r} does not load: {error}") from error
    if not (
        dataclasses.is_dataclass(getattr(module, "Config", None))
        and inspect.isclass(getattr(module, "Mixer", None))
    ):
        raise EdgelinError(
            f"mixer type {type_name!r} is no mixer: the module needs a dataclass Config "
            f"and a class Mixer"
        )
    return module


def read_config(table: Mapping[str, Any], *, where: str) -> tuple[ModuleType, Any]:
    """The module and the ``Config`` of a ``model.mixers`` table.

    Raises:
        EdgelinError: ``type`` is missing or unknown, or another key is wrong.
    """
    values = dict(table)
    if "type" not in values:
        raise EdgelinError(f"{where} lacks the key 'type', the name of a mixer")
    module = load(values.pop("type"))
    with told(f"{module.__name__}.Config"):
        return module, from_dict(module.Config, values, where)


def check(config: ModelConfig) -> None:
    """Read every mixer of a model, those that no layer names too.

    Raises:
        EdgelinError: As :func:`read_config`.
    """
    for name, table in config.mixers.items():
        read_config(table, where=f"model.mixers.{name}")


def build(
    table: Mapping[str, Any], hidden_size: int, layer: int, norm_eps: float, *, where: str
) -> nn.Module:
    """Build the mixer that a ``model.mixers`` table describes.

    Raises:
        EdgelinError: As :func:`read_config`, or a module from outside is no mixer.
    """
    module, config = read_config(table, where=where)
    with told(f"{module.__name__}.Mixer"):
        mixer: nn.Module = module.Mixer(config, hidden_size, layer, norm_eps)
    check_specs(mixer)
    return mixer
