"""Replay of ``golden.json``, the stream that every bundle carries; :mod:`edgelin.export.golden`
writes it and describes the file.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgelin.errors import EdgelinError

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

FILE_NAME = "golden.json"


def replay_golden(bundle: Bundle) -> None:
    """Feed the golden stream to a variant of a bundle.

    Raises:
        EdgelinError: The stream is missing or damaged, or a logit or a state is further away than
            the bundle allows.
    """
    content = _read(bundle)
    allowed, stream = content["tolerance"][bundle.variant], bundle.stream()
    for number, piece in enumerate(content["pieces"]):
        logits = stream.feed(piece["ids"])[piece["top"]["ids"]]
        found = _furthest(logits, piece["top"]["logits"])
        _check(bundle, f"logits after piece {number}", found, allowed["logits"])
    states = stream.states()
    for name, wanted in content["states"].items():
        flat = states[name].reshape(-1)
        at, values = zip(*wanted["samples"], strict=True)
        whole = flat.dtype.kind == "i"
        limit = 0.0 if whole else allowed["states"] * wanted["max_abs"]
        _check(bundle, f"state {name}", _furthest(flat[list(at)], values), limit)


def _read(bundle: Bundle) -> dict[str, Any]:
    """The content of the file, of the right types and complete for this variant."""
    path = bundle.path / FILE_NAME
    if FILE_NAME not in bundle.manifest.files:
        raise EdgelinError(f"{bundle.path} has no {FILE_NAME} in its manifest; export it again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _validate(content, bundle)
    except OSError as error:
        raise EdgelinError(f"{path} cannot be read: {error.strerror}; export again") from error
    except KeyError as error:
        raise EdgelinError(f"{path} lacks {error}; export the bundle again") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise EdgelinError(f"{path} is damaged: {reason}; export the bundle again") from error
    found: dict[str, Any] = content
    return found


def _validate(content: Any, bundle: Bundle) -> None:
    """Raise ValueError or KeyError unless every value can be replayed and compared."""
    vocab = bundle.manifest.vocab_size
    allowed = _typed(_typed(content, dict, "it")["tolerance"], dict, "tolerance")
    allowed = _typed(allowed[bundle.variant], dict, f"tolerance of {bundle.variant}")
    for key in ("logits", "states"):
        if not _number(allowed[key], f"{key} tolerance") > 0:
            raise ValueError(f"{key} tolerance is {allowed[key]}")
    for piece in _filled(content["pieces"], "pieces"):
        ids, top = _typed(piece, dict, "a piece")["ids"], _typed(piece["top"], dict, "top")
        for token in [*_filled(ids, "ids"), *_filled(top["ids"], "top ids")]:
            _index(token, vocab, "a token id")
        if len(_filled(top["logits"], "top logits")) != len(top["ids"]):
            raise ValueError("top has not one logit an id")
        for value in top["logits"]:
            _number(value, "a logit")
    states = _typed(content["states"], dict, "states")
    specs = {spec.name: spec for spec in bundle.manifest.states}
    if unknown := states.keys() - specs.keys():
        raise ValueError(f"the bundle has no state {min(unknown)}")
    for name, spec in specs.items():
        state = _typed(states[name], dict, name)
        if _number(state["max_abs"], f"max_abs of {name}") < 0:
            raise ValueError(f"max_abs of {name} is {state['max_abs']}")
        for sample in _filled(state["samples"], f"samples of {name}"):
            if len(_filled(sample, "a sample")) != 2:
                raise ValueError(f"a sample of {name} is no pair")
            _index(sample[0], math.prod(spec.shape), f"an index of {name}")
            _number(sample[1], f"a sample of {name}")


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
