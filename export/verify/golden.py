"""Replay of ``golden.json``, the stream that every bundle carries; :mod:`edgelin.export.golden`
writes it and describes the file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgelin.errors import EdgelinError
from edgelin.runtimes.manifest import Manifest
from edgelin.runtimes.signature import Tokens

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

FILE_NAME = "golden.json"


def replay_golden(bundle: Bundle) -> None:
    """Feed the golden stream to a variant of a bundle.

    Raises:
        EdgelinError: The stream is missing or damaged, or a logit or a state is further away than
            the bundle allows.
    """
    content = _read(bundle.manifest, bundle.path, bundle.variant)
    allowed, stream = content["tolerance"][bundle.variant], bundle.stream(capsule="none")
    for number, piece in enumerate(content["pieces"]):
        outputs = stream.feed(piece[_key(bundle.manifest)])[piece["top"]["ids"]]
        found = _furthest(outputs, piece["top"]["logits"])
        _check(bundle, f"outputs after piece {number}", found, allowed["logits"])
    states = stream.states()
    for name, wanted in content["states"].items():
        flat = states[name].reshape(-1)
        at, values = zip(*wanted["samples"], strict=True)
        whole = flat.dtype.kind == "i"
        limit = 0.0 if whole else allowed["states"] * wanted["max_abs"]
        _check(bundle, f"state {name}", _furthest(flat[list(at)], values), limit)


def allowed_error(bundle: Bundle) -> float:
    """How far from its model a variant may be on the golden stream, relative to the largest value.

    Raises:
        EdgelinError: The stream is missing or damaged.
    """
    allowed = _read(bundle.manifest, bundle.path, bundle.variant)["tolerance"][bundle.variant]
    return float(allowed["states"])


def golden_steps(manifest: Manifest, folder: Path) -> NDArray[Any]:
    """The whole golden stream [1, T, ...] of a bundle.

    Raises:
        EdgelinError: It is missing or damaged.
    """
    pieces = _read(manifest, folder, manifest.default_variant)["pieces"]
    steps = [step for piece in pieces for step in piece[_key(manifest)]]
    return manifest.input.check([steps], 1)[0]


def golden_magnitudes(manifest: Manifest, folder: Path) -> dict[str, float]:
    """The largest magnitude of every state after the golden stream.

    Raises:
        EdgelinError: The stream is missing or damaged.
    """
    states = _read(manifest, folder, manifest.default_variant)["states"]
    return {name: float(state["max_abs"]) for name, state in states.items()}


def _read(manifest: Manifest, folder: Path, variant: str) -> dict[str, Any]:
    """The content of the file, of the right types and complete for this variant."""
    path = folder / FILE_NAME
    if FILE_NAME not in manifest.files:
        raise EdgelinError(f"{folder} has no {FILE_NAME} in its manifest; export it again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _validate(content, manifest, variant)
    except OSError as error:
        raise EdgelinError(f"{path} cannot be read: {error.strerror}; export again") from error
    except KeyError as error:
        raise EdgelinError(f"{path} lacks {error}; export the bundle again") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise EdgelinError(f"{path} is damaged: {reason}; export the bundle again") from error
    found: dict[str, Any] = content
    return found


def _validate(content: Any, manifest: Manifest, variant: str) -> None:
    """Raise ValueError or KeyError unless every value can be replayed and compared."""
    allowed = _typed(_typed(content, dict, "it")["tolerance"], dict, "tolerance")
    allowed = _typed(allowed[variant], dict, f"tolerance of {variant}")
    for key in ("logits", "states"):
        if not _number(allowed[key], f"{key} tolerance") > 0:
            raise ValueError(f"{key} tolerance is {allowed[key]}")
    key = _key(manifest)
    for piece in _filled(content["pieces"], "pieces"):
        steps, top = _typed(piece, dict, "a piece")[key], _typed(piece["top"], dict, "top")
        try:
            manifest.input.check(_filled(steps, key), 1)
        except EdgelinError as error:
            raise ValueError(error) from error
        for index in _filled(top["ids"], "top ids"):
            _index(index, manifest.output.size, "a top id")
        if len(_filled(top["logits"], "top logits")) != len(top["ids"]):
            raise ValueError("top has not one logit an id")
        for value in top["logits"]:
            _number(value, "a logit")
    states = _typed(content["states"], dict, "states")
    length = sum(len(piece[key]) for piece in content["pieces"])
    specs = {spec.name: spec for spec in manifest.states}
    if unknown := states.keys() - specs.keys():
        raise ValueError(f"the bundle has no state {min(unknown)}")
    for name, spec in specs.items():
        state = _typed(states[name], dict, name)
        if _number(state["max_abs"], f"max_abs of {name}") < 0:
            raise ValueError(f"max_abs of {name} is {state['max_abs']}")
        for sample in _filled(state["samples"], f"samples of {name}"):
            if len(_filled(sample, "a sample")) != 2:
                raise ValueError(f"a sample of {name} is no pair")
            _index(sample[0], math.prod(spec.sized(length)), f"an index of {name}")
            _number(sample[1], f"a sample of {name}")


def _key(manifest: Manifest) -> str:
    """Under which name a piece holds its steps."""
    return "ids" if isinstance(manifest.input, Tokens) else "features"


def _typed(value: Any, kind: type, what: str) -> Any:
    """The value, which must be of a type."""
    if not isinstance(value, kind):
        raise ValueError(f"{what} is no {'object' if kind is dict else 'list'}")
    return value


def _filled(value: Any, what: str) -> list[Any]:
    """The value, which must be a list that is not empty."""
    found: list[Any] = _typed(value, list, what)
    if not found:
        raise ValueError(f"{what} is empty")
    return found


def _index(value: Any, size: int, what: str) -> None:
    """Refuse all but whole numbers from 0 to ``size - 1``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ValueError(f"{what} is {str(value)[:40]}, 0 .. {size - 1} is allowed")


def _number(value: Any, what: str) -> float:
    """The value, which must be a finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not abs(value) < 1e300:  # JSON's integers know no bounds; NaN is not below
        raise ValueError(f"{what} is {str(value)[:40]}, a finite number is needed")
    return float(value)


def _furthest(found: NDArray[Any], wanted: Any) -> float:
    """The largest difference; infinite where a value is not finite."""
    largest = float(np.abs(found.astype(np.float64) - np.asarray(wanted)).max())
    return largest if np.isfinite(largest) else float("inf")


def _check(bundle: Bundle, what: str, found: float, limit: float) -> None:
    """Raise unless ``found`` is within ``limit``."""
    if not found <= limit:
        raise EdgelinError(
            f"{bundle.path} {bundle.variant}: golden stream: {what} is off by {found:.2g}, "
            f"{limit:.2g} is allowed; this machine computes otherwise, or the bundle is damaged"
        )
