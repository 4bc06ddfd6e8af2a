"""Replay of ``golden.json``, the stream that every bundle carries; :mod:`edgelin.export.golden`
writes it and describes the file.
"""

from __future__ import annotations

import json
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
        EdgelinError: A logit or a state is further away than the bundle allows.
    """
    content = json.loads((bundle.path / FILE_NAME).read_text(encoding="utf-8"))
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


def _furthest(found: NDArray[Any], wanted: Any) -> float:
    """The largest difference; infinite where a value is not finite."""
    largest = float(np.abs(found.astype(np.float64) - np.asarray(wanted)).max())
    return largest if np.isfinite(largest) else float("inf")


def _check(bundle: Bundle, what: str, found: float, limit: float) -> None:
    """Raise unless ``found`` is within ``limit``."""
    if found > limit:
        raise EdgelinError(
            f"{bundle.path} {bundle.variant}: golden stream: {what} is off by {found:.2g}, "
            f"{limit:.2g} is allowed; this machine computes otherwise, or the bundle is damaged"
        )
