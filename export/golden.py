"""The golden stream: a few steps with the answers of the float64 model, stored in every bundle.

``golden.json``, which a runtime in any language can replay in a second:

- ``pieces``: feed the token lists ``ids``, or the lists of steps ``features``, one after the other,
  from the initial states. After each, ``top`` has the indices (``ids``) and values (``logits``) of
  the 8 largest logits or outputs of the last position.
- ``states``: after the last piece, for every state ``max_abs``, the largest magnitude, and
  ``samples``, pairs of (index in the flattened tensor, value), of batch row 0.
- ``tolerance``: per variant, how far a logit or output (``logits``, absolute) and a state
  (``states``, times the ``max_abs`` of that state) may be away. Integer states must be equal.
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

from edgelin.export.contract import signature
from edgelin.export.rounding import Rounded
from edgelin.layers import FeatureProjection
from edgelin.runtimes.distribution import divergence
from edgelin.runtimes.session import Bundle

if TYPE_CHECKING:
    from edgelin.model import SequenceModel

FILE_NAME = "golden.json"
# One step, the next, a ragged chunk, a full one, and a step again.
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
    """Steps and what a model makes of them.

    Args:
        inputs: int64 `[T]` tokens, or float32 `[T, F]` features.
        outputs: float64 `[T, size]`: logits, or the outputs of a model of features.
        states: Name to the state after the last step, batch axis dropped.
        is_distribution: Whether softmax makes probabilities of the outputs.
    """

    inputs: npt.NDArray[Any]
    outputs: Array
    states: dict[str, npt.NDArray[Any]]
    is_distribution: bool


@dataclass(frozen=True)
class Errors:
    """How far a graph is from a float64 model on the golden stream.

    Args:
        outputs: Largest difference over the largest logit, or output of a model of features.
        states: The same, of the worst state.
        outputs_rms: Root mean square of the difference over that of the outputs.
        top1: Share of positions with the same likeliest token or class; None in a regression.
        kl: Mean Kullback-Leibler divergence from the model's distribution, in nat; None as above.
        max_difference: Largest difference of an output, absolute.
        finite: Whether everything is finite.
    """

    outputs: float
    states: float
    outputs_rms: float
    top1: float | None
    kl: float | None
    max_difference: float
    finite: bool


def inputs_of(model: SequenceModel) -> npt.NDArray[Any]:
    """The stream: the same for every model of this vocabulary size, or of these features.

    Features are normal numbers with the mean and deviation that the model takes off its data.
    """
    source, _ = signature(model.config)
    steps: npt.NDArray[Any] = source.random(np.random.default_rng(_SEED), 1, sum(PIECES))[0]
    if isinstance(model.embedding, FeatureProjection):
        mean, scale = (t.float().numpy() for t in (model.embedding.mean, model.embedding.scale))
        # a scale of 0 belongs to a feature that never changed
        steps = mean + np.divide(steps, scale, out=np.zeros_like(steps), where=scale != 0)
    return steps


def reference(model: SequenceModel, rounded: Mapping[str, Rounded] | None = None) -> Stream:
    """Run the model in float64, in one call from its initial state.

    Args:
        model: The model; not changed.
        rounded: Parameters to replace by their quantised values.
    """
    exact = copy.deepcopy(model).double().eval()
    inputs = inputs_of(model)
    _, output = signature(model.config)
    with torch.no_grad():
        for name, matrix in (rounded or {}).items():
            parameter = exact.get_parameter(name)
            values = torch.from_numpy(matrix.values(parameter.shape[-1]))
            parameter.copy_(values.view_as(parameter))
        outputs, states = exact(torch.from_numpy(inputs)[None], exact.initial_state(1, "cpu"))
    return Stream(
        inputs,
        outputs[0].double().numpy(),
        {name: value[0].numpy() for name, value in states.items()},
        output.is_distribution,
    )


def replay(bundle: Bundle, inputs: npt.NDArray[Any]) -> Stream:
    """Feed the pieces to a bundle's default runtime.

    Args:
        bundle: An opened variant.
        inputs: `[T]` or `[T, F]`, T = sum of ``PIECES``.
    """
    stream = bundle.stream()
    ends = np.cumsum(PIECES)
    outputs = [
        stream.feed(inputs[end - length : end], all_outputs=True)
        for end, length in zip(ends, PIECES, strict=True)
    ]
    states = {name: value[0] for name, value in stream.states().items()}
    is_distribution = bundle.manifest.output.is_distribution
    return Stream(inputs, np.concatenate(outputs).astype(np.float64), states, is_distribution)


def compare(wanted: Stream, got: Stream) -> Errors:
    """Measure the differences."""
    difference = got.outputs - wanted.outputs
    shares = wanted.is_distribution
    same = (wanted.outputs.argmax(-1) == got.outputs.argmax(-1)).mean()
    states = [
        float(np.abs(got.states[name].astype(np.float64) - value).max() / _scale(value))
        for name, value in wanted.states.items()
    ]
    finite = np.isfinite(got.outputs).all() and all(np.isfinite(states))
    return Errors(
        outputs=float(np.abs(difference).max() / _scale(wanted.outputs)),
        states=max(states, default=0.0),
        outputs_rms=float(np.sqrt(np.mean(difference**2) / np.mean(wanted.outputs**2))),
        top1=float(same) if shares else None,
        kl=float(divergence(wanted.outputs, got.outputs).mean()) if shares else None,
        max_difference=float(np.abs(difference).max()),
        finite=bool(finite),
    )


def write(folder: Path, wanted: Stream, errors: dict[str, Errors]) -> None:
    """Write ``golden.json``; tolerances come from what each variant missed by."""
    ends = np.cumsum(PIECES)
    key = "ids" if wanted.inputs.ndim == 1 else "features"
    pieces = []
    for end, length in zip(ends, PIECES, strict=True):
        outputs = wanted.outputs[end - 1]
        top = np.argsort(-outputs, kind="stable")[:_TOP]
        pieces.append(
            {
                key: _plain(wanted.inputs[end - length : end]),
                "top": {"ids": top.tolist(), "logits": [_short(x) for x in outputs[top]]},
            }
        )
    scale = _scale(wanted.outputs)
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


def _plain(steps: npt.NDArray[Any]) -> list[Any]:
    """Steps as JSON, float32 in its shortest decimals."""
    if steps.ndim == 1:
        return list(steps.tolist())
    return [[float(str(x)) for x in row] for row in steps]


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
