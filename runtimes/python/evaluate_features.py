"""Quality of a bundle on sequences of features with known answers, alone or against another.

Every sequence starts from the initial state. A head ``"sequence"`` is scored after the last step of
each, a head ``"step"`` at every step whose class is known (not -1). Accuracy is the share of right
classes, mean squared error that of all numbers. Against a second bundle q, on the same answers:
mean KL(q || p) in nat and the share of equal classes, or the relative error
rms(p - q) / rms(q - mean(q)) of a regression.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from edgelin.errors import EdgelinError
from edgelin.runtimes import checks
from edgelin.runtimes.distribution import deviation, divergence
from edgelin.runtimes.feature_file import check_features, config_of
from edgelin.runtimes.session import Bundle
from edgelin.sequences import Sequences, read_sequences

Array = NDArray[Any]


@dataclass(frozen=True)
class FeatureQuality:
    """What :func:`evaluate` measures.

    Args:
        sequences: Sequences read.
        answers: Answers scored.
        accuracy: Share of right classes; None in a regression.
        mean_squared_error: Of a regression; None in a classification.
        against_accuracy: Accuracy of the second bundle.
        against_mean_squared_error: Mean squared error of the second bundle.
        kl_nat: Mean KL(second || first) in nat.
        agreement: Share of answers where both give the same class.
        relative_error: Of the first beside the second, in a regression.
    """

    sequences: int
    answers: int
    accuracy: float | None = None
    mean_squared_error: float | None = None
    against_accuracy: float | None = None
    against_mean_squared_error: float | None = None
    kl_nat: float | None = None
    agreement: float | None = None
    relative_error: float | None = None


def evaluate(bundle: Bundle, path: Path, *, against: Bundle | None = None) -> FeatureQuality:
    """Measure a bundle on a data set.

    Args:
        bundle: The bundle p.
        path: An ``.npz``, see :mod:`edgelin.sequences`.
        against: The bundle q; its input and output must be the same.

    Raises:
        EdgelinError: The file does not fit the bundle, or the bundles do not fit each other.
    """
    manifest = bundle.manifest
    source = check_features(manifest.input, bundle.path)
    if against is not None and _signature(against) != _signature(bundle):
        raise EdgelinError(
            f"{bundle.path} and {against.path} read or answer different things; only bundles with "
            "equal input and output can be compared"
        )
    data = read_sequences(path, config_of(source, manifest.output))
    assert data.y is not None
    scored = np.ones(len(data.y), bool) if manifest.output.task == "regression" else data.y >= 0
    if not scored.any():
        raise EdgelinError(f"{path}: y is -1 everywhere; give at least one frame a class")
    y, p = data.y[scored], _outputs(bundle, data)[scored]
    fields = _score(p, y, manifest.output.is_distribution)
    if against is not None:
        q = _outputs(against, data)[scored]
        others = _score(q, y, manifest.output.is_distribution)
        fields |= {f"against_{name}": value for name, value in others.items()}
        fields |= _distance(p, q, manifest.output.is_distribution)
    return FeatureQuality(len(data.lengths), len(y), **fields)


def evaluate_checkpoint(folder: Path, path: Path) -> FeatureQuality:
    """Measure a checkpoint folder in torch.

    Raises:
        EdgelinError: torch is not installed, the folder is no checkpoint of a model of features, or
            the file does not fit it.
    """
    with checks.needing_torch(folder):
        from edgelin import checkpoint
        from edgelin.train import dataset
        from edgelin.train.features import score
    model, config = checkpoint.load(folder)
    if config.features is None:
        raise EdgelinError(f"{folder} reads text, not features; give it --text")
    data = dataset.load([path], config.features)
    is_class = config.features.task == "classification"
    name = "accuracy" if is_class else "mean_squared_error"
    answers = int((data.y >= 0).sum()) if is_class else len(data.y)
    return FeatureQuality(len(data.lengths), answers, **{name: score(model, data)})


def _signature(bundle: Bundle) -> tuple[Any, Any]:
    """What a bundle reads and answers."""
    return bundle.manifest.input, bundle.manifest.output


def _outputs(bundle: Bundle, data: Sequences) -> Array:
    """Outputs `[n, size]` after every sequence, or `[sum of lengths, size]` at every step."""
    stream, rows = bundle.stream(capsule="none"), []
    every = bundle.manifest.output.head == "step"
    for x in tqdm(data, total=len(data.lengths), unit="sequence", disable=None, leave=False):
        stream.reset()
        found = stream.feed(x[None], all_outputs=every)
        rows.append(found[0] if every else found)
    return np.concatenate(rows)


def _score(outputs: Array, y: Array, is_distribution: bool) -> dict[str, float]:
    """Accuracy or mean squared error."""
    if is_distribution:
        return {"accuracy": float((outputs.argmax(-1) == y).mean())}
    return {"mean_squared_error": float(np.square(outputs.astype(np.float64) - y).mean())}


def _distance(p: Array, q: Array, is_distribution: bool) -> dict[str, float]:
    """How far the outputs p are from q."""
    if not is_distribution:
        return {"relative_error": deviation(q, p)}
    return {
        "kl_nat": float(divergence(q, p).mean()),
        "agreement": float((p.argmax(-1) == q.argmax(-1)).mean()),
    }
