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

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgelin.export.activations import float_activations
from edgelin.export.contract import signature
from edgelin.layers import FeatureProjection
from edgelin.mapped import Empty, release
from edgelin.recurrences import CHUNK
from edgelin.runtimes.buffers import Buffers
from edgelin.runtimes.distribution import divergence
from edgelin.runtimes.manifest import Manifest, Variant
from edgelin.runtimes.session import Bundle, default_threads, open_session

if TYPE_CHECKING:
    from edgelin.model import SequenceModel

FILE_NAME = "golden.json"
# One step, the next, a ragged chunk, a full one, and a step again.
PIECES = (1, 1, 63, 64, 1)
_TOP = 8
_SAMPLES = 4
_SEED = 20_231
_LEAST = 1e-30  # in the place of a largest magnitude of 0
_POSITIONS = 16  # compared at a time
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
        states: Name to the state after the last step, batch axis dropped; empty: not compared.
        is_distribution: Whether softmax makes probabilities of the outputs.
    """

    inputs: npt.NDArray[Any]
    outputs: Array
    states: dict[str, npt.NDArray[Any]]
    is_distribution: bool

    def first(self, length: int) -> Stream:
        """The first steps, without states."""
        return dataclasses.replace(
            self, inputs=self.inputs[:length], outputs=self.outputs[:length], states={}
        )


@dataclass(frozen=True)
class Errors:
    """How far a graph is from a float64 model on the golden stream.

    Args:
        outputs: Largest difference over the largest logit, or output of a model of features.
        states: The same, of the worst state; None where none was compared.
        outputs_rms: Root mean square of the difference over that of the outputs.
        top1: Share of positions with the same likeliest token or class; None in a regression.
        kl: Mean Kullback-Leibler divergence from the model's distribution, in nat; None as above.
        max_difference: Largest difference of an output, absolute.
        finite: Whether everything is finite.
    """

    outputs: float
    states: float | None
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


def replay(bundle: Bundle, inputs: npt.NDArray[Any], empty: Empty = np.empty) -> Stream:
    """Feed the pieces to a bundle's default runtime.

    Args:
        bundle: An opened variant.
        inputs: `[T]` or `[T, F]`, T = sum of ``PIECES``.
        empty: Makes the array of the outputs.
    """
    stream, output = bundle.stream(capsule="none"), bundle.manifest.output
    outputs = empty((len(inputs), output.size), np.float64)
    for end, length in zip(np.cumsum(PIECES), PIECES, strict=True):
        piece = slice(end - length, end)
        outputs[piece] = stream.feed(inputs[piece], all_outputs=True)
    states = {name: value[0] for name, value in stream.states().items()}
    return Stream(inputs, outputs, states, output.is_distribution)


def replay_float(folder: Path, variant: Variant, inputs: npt.NDArray[Any]) -> Stream:
    """Feed a chunk and a step to a quantised graph whose activations are left float.

    Its kernels are slow, hence so few calls.

    Args:
        folder: The bundle.
        variant: The graph.
        inputs: As of :func:`replay`; its first ``CHUNK + 1`` steps are fed.
    """
    manifest = Manifest.read(folder)
    with float_activations(folder / variant.file) as graph:
        session = open_session(graph, default_threads(), prepack=False)
    buffers = Buffers(session, manifest, 1, in_place=False)
    inputs = inputs[: CHUNK + 1]
    outputs = [
        buffers.run(piece[None], all_outputs=True)[0].astype(np.float64)
        for piece in (inputs[:CHUNK], inputs[CHUNK:])
    ]
    return Stream(inputs, np.concatenate(outputs), {}, manifest.output.is_distribution)


def compare(wanted: Stream, got: Stream) -> Errors:
    """Measure the differences of the steps that ``got`` has, and of the states that both have."""
    wanted = wanted if got.states else wanted.first(len(got.outputs))
    total = squares = distance = largest = scale = 0.0
    same = 0
    for start in range(0, len(wanted.outputs), _POSITIONS):  # a vocabulary may be large
        one, two = (s.outputs[start : start + _POSITIONS] for s in (wanted, got))
        difference = two - one
        largest = np.maximum(largest, np.abs(difference).max())  # keeps nan
        scale = max(scale, float(np.abs(one).max()))
        squares += float(np.square(difference).sum())
        total += float(np.square(one).sum())
        same += int((one.argmax(-1) == two.argmax(-1)).sum())
        distance += float(divergence(one, two).sum()) if wanted.is_distribution else 0.0
        release()
    states = [
        float(np.abs(got.states[name].astype(np.float64) - value).max() / _scale(value))
        for name, value in wanted.states.items()
    ]
    count = len(wanted.outputs)
    return Errors(
        outputs=float(largest / max(scale, _LEAST)),
        states=max(states, default=None),
        outputs_rms=float(np.sqrt(squares / total)),
        top1=same / count if wanted.is_distribution else None,
        kl=distance / count if wanted.is_distribution else None,
        max_difference=float(largest),
        finite=bool(np.isfinite(largest) and all(np.isfinite(states))),
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
                "states": _short(max(_FLOOR, _MARGIN * (error.states or 0))),
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
    return max(float(value.max(initial=0)), -float(value.min(initial=0)), _LEAST)


def _short(value: float) -> float:
    """Nine digits: more than float32 has."""
    return float(f"{value:.9g}")
