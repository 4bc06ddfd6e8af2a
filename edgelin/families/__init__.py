"""Checkpoints that other projects trained: one file a family.

A family is a module of this folder with two names::

    MODEL_TYPES = ("mamba2",)  # the model_type of config.json
    read(fields: Fields) -> tuple[ModelConfig, Weights]

and, where there are checkpoints whose config has no ``model_type``, a third::

    matches(values: Mapping[str, Any]) -> bool

or, where there are ``.pth`` files without any config, one that makes it from names and shapes::

    describe(tensors: Tensors) -> dict[str, Any] | None

``read`` turns the keys of ``config.json`` into our sizes and mixers, and gives a function that
yields our parameters, one by one, from the tensors of the checkpoint. Constant factors (multipliers
of the stream, scales of attention, "1 + weight" norms) are folded into the weights there. Every key
and every tensor must be taken or named as harmless (:mod:`edgelin.families.reading`), so that what
would change the numbers is never passed over in silence. A family brings no computation of its own:
what is missing goes into the mixers, where every model has it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

Weights = Callable[[Tensors], Iterator[tuple[str, Tensor]]]


def modules() -> dict[str, ModuleType]:
    """Every family by name of its file."""
    found = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        if hasattr(module, "MODEL_TYPES"):
            found[entry.name] = module
    return found


def find(values: Mapping[str, Any], where: str) -> ModuleType:
    """The family of a ``config.json``: that of its ``model_type``, or one that knows its keys.

    Raises:
        EdgelinError: No family reads it.
    """
    found = modules().values()
    known = {name: module for module in found for name in module.MODEL_TYPES}
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in known:
        return known[model_type]
    if model_type is None:
        for module in found:
            if hasattr(module, "matches") and module.matches(values):
                return module
    what = "has no model_type" if model_type is None else f"is of model_type {model_type!r}"
    raise EdgelinError(
        f"{where} {what}, which no family reads; supported: {', '.join(sorted(known))} "
        f"(see `edgelin families`)"
    )


def describe(tensors: Tensors) -> dict[str, Any]:
    """The keys of a ``config.json`` for a checkpoint that has none.

    Raises:
        EdgelinError: No family knows such tensors.
    """
    found = [m for m in modules().values() if hasattr(m, "describe")]
    for module in found:
        values: dict[str, Any] | None = module.describe(tensors)
        if values is not None:
            return values
    known = ", ".join(name for module in found for name in module.MODEL_TYPES)
    raise EdgelinError(
        f"{tensors.where} has no config.json, and its tensors are of no family that needs none "
        f"({known}); add config.json"
    )


__all__ = ["Fields", "ModelConfig", "Tensors", "Weights", "describe", "find", "modules"]
