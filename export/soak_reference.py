"""The float64 model beside the marks of a soak (:mod:`edgelin.runtimes.soak`): how far it drifts.

The model in torch reads the same inputs from the first on, in float64, with the weights that the
graph has (the rounded ones of a quantised variant), in the parallel form, which
:mod:`edgelin.export.verify` and the tests hold to the sequential recurrence. At every mark its
answer and states stand beside those of the bundle; the error of x beside the truth y is
max|x - y| / max|y|. It stops and goes on as the stream does: ``float64.npz`` has its states,
``float64.json`` what was found.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from edgelin.errors import EdgelinError
from edgelin.export.step_form import load
from edgelin.export.verify.compare import exported
from edgelin.export.verify.forms import relative_error
from edgelin.export.verify.manifest import check_same_model
from edgelin.export.verify.quality import bits
from edgelin.export.verify.weights import read_weights, rounded_weights
from edgelin.files import replacing
from edgelin.runtimes import state_file
from edgelin.runtimes.distribution import divergence
from edgelin.runtimes.measure import write_json
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.soak import Source, mark
from edgelin.sequences import DAMAGED

STATES, FOUND = "float64.npz", "float64.json"
_CALL = 1024  # steps a call: long ones are faster, and the numbers do not depend on it
_SAVE_EVERY = 30.0  # seconds

Array = NDArray[Any]


@dataclass(frozen=True)
class Distance:
    """What the bundle is away from the float64 model at one position.

    Args:
        position: Steps read.
        outputs: Error of the answer.
        kl: Kullback-Leibler divergence of its distribution, in nat; None in a regression.
        states: State to its error.
    """

    position: int
    outputs: float
    kl: float | None
    states: dict[str, float]


def distances(
    bundle: Bundle,
    checkpoint: Path,
    source: Source,
    folder: Path,
    positions: list[int],
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> list[Distance]:
    """Read up to the last of the positions, or until asked to stop.

    Args:
        bundle: The opened variant.
        checkpoint: What it was exported from.
        source: The inputs of the stream.
        folder: Of the soak.
        positions: Of its marks, ascending.
        asked_to_stop: See above.

    Returns:
        What was found, in order of position.

    Raises:
        EdgelinError: The checkpoint is another model, or a file is damaged or cannot be written.
    """
    with exported(checkpoint, bundle.path) as own:
        check_same_model(bundle.manifest, own, checkpoint)
        reader = _Reader(_model(bundle, own), source, folder)
    # What was found after the states were saved last is found again.
    known = _read_found(folder) if reader.position else []
    found = [distance for distance in known if distance.position <= reader.position]
    saved = time.monotonic()
    with tqdm(
        total=positions[-1], initial=reader.position, desc="float64", disable=None, leave=False
    ) as bar:
        for position in (p for p in positions if p > reader.position):
            while reader.position < position and not asked_to_stop():
                bar.update(reader.advance(position))
                if time.monotonic() - saved > _SAVE_EVERY:
                    _save(reader, found, folder)
                    saved = time.monotonic()
            if reader.position < position:
                break
            found.append(_distance(bundle, reader, folder))
    _save(reader, found, folder)
    return found


class _Reader:
    """The float64 model and where it stands."""

    def __init__(self, model: Any, source: Source, folder: Path) -> None:
        self._model, self._source = model, source
        self._state = model.initial_state(1, "cpu")
        self._hidden: torch.Tensor | None = None
        self.position = 0
        if (folder / STATES).is_file():
            self._restore(folder / STATES)

    def advance(self, end: int) -> int:
        """Read on, one call; returns how many steps."""
        count = min(_CALL - self.position % _CALL, end - self.position)
        steps = torch.from_numpy(self._source.read(self.position, count))[None]
        if steps.is_floating_point():
            steps = steps.double()
        with torch.inference_mode():
            hidden, self._state = self._model.hidden(steps, self._state)
            self._hidden = hidden[:, -1]
        self.position += count
        return count

    def answer(self) -> Array:
        """Outputs ``[1, size]`` after the last step."""
        assert self._hidden is not None
        with torch.inference_mode():
            return np.asarray(self._model.logits(self._hidden).numpy())

    def states(self) -> dict[str, Array]:
        """The states by name."""
        return {name: tensor.numpy() for name, tensor in self._state.items()}

    def _restore(self, path: Path) -> None:
        """Stand where a file says."""
        try:
            with np.load(path, allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files}
            self.position = int(arrays.pop("read"))
            if {k: v.shape for k, v in arrays.items()} != {
                k: tuple(v.shape) for k, v in self._state.items()
            }:
                raise ValueError("its states are others")
        except (OSError, KeyError, *DAMAGED) as error:
            raise EdgelinError(f"{path} is damaged: {error}; remove it to start again") from error
        self._state = {name: torch.from_numpy(array) for name, array in arrays.items()}


def _model(bundle: Bundle, checkpoint: Path) -> Any:
    """The model in float64 with the weights that the graph has."""
    model = load(checkpoint, dtype=torch.float64)
    if bits(bundle) is not None:
        graph = bundle.path / bundle.manifest.variants[bundle.variant].file
        with torch.no_grad():
            for name, values in rounded_weights(graph, read_weights(checkpoint)).items():
                model.get_parameter(name).copy_(torch.from_numpy(values))
    return model


def _distance(bundle: Bundle, reader: _Reader, folder: Path) -> Distance:
    """Compare with the mark at the reader's position."""
    path = mark(folder, reader.position)
    saved = state_file.read(path)
    state_file.check(saved, path, bundle.manifest, variant=bundle.variant, batch=1)
    wanted, found = reader.answer(), saved.tensors[bundle.manifest.output.name]
    distribution = bundle.manifest.output.is_distribution
    return Distance(
        position=reader.position,
        outputs=relative_error(found, wanted),
        kl=float(divergence(wanted, found)[0]) if distribution else None,
        states={
            name: relative_error(saved.tensors[name], value)
            for name, value in reader.states().items()
        },
    )


def _save(reader: _Reader, found: list[Distance], folder: Path) -> None:
    """Write what was found, then how the reader stands."""
    if not reader.position:
        return
    write_json([asdict(distance) for distance in found], folder / FOUND)
    try:
        with replacing(folder / STATES) as part, part.open("wb") as file:
            arrays: dict[str, Any] = {"read": reader.position, **reader.states()}
            np.savez(file, **arrays)
    except OSError as error:
        raise EdgelinError(f"{folder / STATES} cannot be written: {error.strerror}") from error


def _read_found(folder: Path) -> list[Distance]:
    """What an earlier run found."""
    path = folder / FOUND
    try:
        return [Distance(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise EdgelinError(f"{path} is damaged: {error}; remove {folder / STATES}") from error
