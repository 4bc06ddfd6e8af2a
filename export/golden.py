"""The golden stream: a few tokens with the answers of the float64 model, stored in every bundle.

``golden.json``, which a runtime in any language can replay in a second:

- ``pieces``: feed these token lists one after the other, from the initial states. After each,
  ``top`` has the ids and values of the 8 largest logits of the last position.
- ``states``: after the last piece, for every state ``max_abs``, the largest magnitude, and
  ``samples``, pairs of (index in the flattened tensor, value), of batch row 0.
- ``tolerance``: per variant, how far a logit (``logits``, absolute) and a state (``states``, times
  the ``max_abs`` of that state) may be away. Integer states must be equal.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from edgelin.export.rounding import Rounded
from edgelin.runtimes.distribution import divergence
from edgelin.runtimes.session import Bundle

if TYPE_CHECKING:
    from edgelin.model import SequenceModel

FILE_NAME = "golden.json"
# One token, the next, a ragged chunk, a full one, and a token again.
PIECES = (1, 1, 63, 64, 1)
_TOP = 8
_SAMPLES = 4
_SEED = 20_231
# Float32 graphs: room for other CPUs' summation order. Quantised ones: for other int8 kernels.
_FLOOR = 1e-4
_MARGIN = 2.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stream:
    """Tokens and what a model makes of them.

    Args:
        ids: int64 `[T]` tokens.
        logits: float64 `[T, vocab]`.
        states: Name to the state after the last token, batch axis dropped.
    """

    ids: npt.NDArray[np.int64]
    logits: Array
    states: dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Errors:
    """How far a graph is from a float64 model on the golden stream.

    Args:
        logits: Largest difference over the largest logit.
        states: The same, of the worst state.
        logits_rms: Root mean square of the difference over that of the logits.
        top1: Share of positions with the same likeliest token.
        kl: Mean Kullback-Leibler divergence from the model's distribution, in nat.
        max_difference: Largest difference of a logit, absolute.
        finite: Whether everything is finite.
    """

    logits: float
    states: float
    logits_rms: float
    top1: float
    kl: float
    max_difference: float
    finite: bool


def token_ids(vocab_size: int) -> npt.NDArray[np.int64]:
    """The tokens of the stream: the same for every model of this vocabulary size."""
    random = np.random.default_rng(_SEED)
    return random.integers(0, vocab_size, sum(PIECES), dtype=np.int64)


def reference(model: SequenceModel, rounded: Mapping[str, Rounded] | None = None) -> Stream:
    """Run the model in float64, in one call from its initial state.

    Args:
        model: The model; not changed.
        rounded: Parameters to replace by their quantised values.
    """
    exact = copy.deepcopy(model).double().eval()
    ids = token_ids(exact.config.vocab_size)
    with torch.no_grad():
        for name, matrix in (rounded or {}).items():
            parameter = exact.get_parameter(name)
            parameter.copy_(torch.from_numpy(matrix.values(parameter.shape[1])))
        logits, states = exact(torch.from_numpy(ids)[None], exact.initial_state(1, "cpu"))
    return Stream(
        ids,
        logits[0].double().numpy(),
        {name: value[0].numpy() for name, value in states.items()},
    )


def replay(bundle: Bundle, ids: npt.NDArray[np.int64]) -> Stream:
    """Feed the pieces to a bundle's default runtime.

    Args:
        bundle: An opened variant.
        ids: int64 `[T]`, T = sum of ``PIECES``.
    """
    stream = bundle.stream()
    ends = np.cumsum(PIECES)
    logits = [
        stream.feed(ids[end - length : end], all_logits=True)
        for end, length in zip(ends, PIECES, strict=True)
    ]
    states = {name: value[0] for name, value in stream.states().items()}
    return Stream(ids, np.concatenate(logits).astype(np.float64), states)


def compare(wanted: Stream, got: Stream) -> Errors:
    """Measure the differences."""
    difference = got.logits - wanted.logits
    states = [
        float(np.abs(got.states[name].astype(np.float64) - value).max() / _scale(value))
        for name, value in wanted.states.items()
    ]
    finite = np.isfinite(got.logits).all() and all(np.isfinite(states))
    return Errors(
        logits=float(np.abs(difference).max() / _scale(wanted.logits)),
        states=max(states, default=0.0),
        logits_rms=float(np.sqrt(np.mean(difference**2) / np.mean(wanted.logits**2))),
        top1=float((wanted.logits.argmax(-1) == got.logits.argmax(-1)).mean()),
        kl=float(divergence(wanted.logits, got.logits).mean()),
        max_difference=float(np.abs(difference).max()),
        finite=bool(finite),
    )


def write(folder: Path, wanted: Stream, errors: dict[str, Errors]) -> None:
    """Write ``golden.json``; tolerances come from what each variant missed by."""
    ends = np.cumsum(PIECES)
    pieces = []
    for end, length in zip(ends, PIECES, strict=True):
        logits = wanted.logits[end - 1]
        top = np.argsort(-logits, kind="stable")[:_TOP]
        pieces.append(
            {
                "ids": wanted.ids[end - length : end].tolist(),
                "top": {"ids": top.tolist(), "logits": [_short(x) for x in logits[top]]},
            }
        )
    scale = _scale(wanted.logits)
    content = {
        "format": 1,
        "pieces": pieces,
        "states": {name: _checksum(value) for name, value in wanted.states.items()},
        "tolerance": {
            name: {
                "logits": _short(max(_FLOOR * scale, _MARGIN * error.max_difference)),
                "states": _short(max(_FLOOR, _MARGIN * error.states)),
            }
            for name, error in errors.items()
        },
    }
    text = json.dumps(content, indent=1) + "\n"
    (folder / FILE_NAME).write_text(text, encoding="utf-8")


def _checksum(value: npt.NDArray[Any]) -> dict[str, Any]:
    """Largest magnitude and a few cells, spread over the flattened tensor."""
    flat = value.reshape(-1)
    at = np.linspace(0, flat.size - 1, min(_SAMPLES, flat.size)).astype(int)
    return {
        "max_abs": _short(float(np.abs(flat).max())),
        "samples": [[int(i), _short(float(flat[i]))] for i in at],
    }


def _scale(value: npt.NDArray[Any]) -> float:
    """Largest magnitude, never 0."""
    return max(float(np.abs(value).max(initial=0)), 1e-30)


def _short(value: float) -> float:
    """Nine digits: more than float32 has."""
    return float(f"{value:.9g}")
