"""Token mixers: one ``nn.Module`` a file around a recurrence (or an attention window).

A mixer module has ``Config``, a frozen dataclass read from ``model.mixers.<name>``, and ``Mixer``::

    Mixer(config, hidden_size, layer, norm_eps)
    mixer.state_specs() -> list[StateSpec]
    mixer(x [B, T, d], state, position [B] int64) -> (y [B, T, d], new state)

``state`` is keyed by ``StateSpec.name``. One forward serves training (any T), prefill and decode
(T = 1). ``Mixer.needs_position = True`` asks the model for the number of tokens already seen.

Conventions: the projection back into the residual stream is ``out_proj`` (its initial weights
shrink with depth); projections that make gates of the recurrence have ``beta`` or ``decay`` in
their names (they stay float in quantised graphs); an optional ``reset_parameters()`` runs after
the model's own initialisation.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from edgelin.config import from_dict
from edgelin.errors import EdgelinError


def load(type_name: str) -> ModuleType:
    """Import the mixer module of this type: a file here, or ``"package.module"`` anywhere.

    Raises:
        EdgelinError: There is no such module.
    """
    path = type_name if "." in type_name else f"{__name__}.{type_name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise
        known = ", ".join(sorted(m.name for m in pkgutil.iter_modules(__path__)))
        raise EdgelinError(
            f"mixer type {type_name!r} is not known; use one of {known}, "
            "or the dotted path of a module with Config and Mixer"
        ) from None


def build(
    table: Mapping[str, Any], hidden_size: int, layer: int, norm_eps: float, *, where: str
) -> nn.Module:
    """Build the mixer that a ``model.mixers`` table describes.

    Raises:
        EdgelinError: ``type`` is missing or unknown, or another key is wrong.
    """
    values = dict(table)
    if "type" not in values:
        raise EdgelinError(f"{where} lacks the key 'type', the name of a mixer")
    module = load(values.pop("type"))
    config = from_dict(module.Config, values, where)
    mixer: nn.Module = module.Mixer(config, hidden_size, layer, norm_eps)
    return mixer
