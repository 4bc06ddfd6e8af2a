"""Training on features: windows in an order of their own, loss of the wanted answers, score.

Cross-entropy of classes, mean squared error of values; scored by accuracy or the same error. A
sequence up to ``optim.sequence_length`` is read whole; of a longer one of n frames,
ceil(n / sequence_length) windows an epoch are read, at random places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from edgelin.config import OptimConfig, RunConfig
from edgelin.errors import EdgelinError
from edgelin.files import sha256
from edgelin.layers import FeatureProjection
from edgelin.model import SequenceModel
from edgelin.train.dataset import Array, Dataset, load
from edgelin.train.task import Hidden, Metric, State

_METRICS = {
    "classification": Metric("accuracy", higher_is_better=True),
    "regression": Metric("mean_squared_error"),
}
_POOL = 8  # batches among which windows of like lengths are brought together
_FRAMES = 16384  # of a batch that is scored
_CHUNK = 1024  # frames a row of one call


class Order:
    """Which windows a step reads: a pure function of (seed, step).

    An epoch visits the windows in a permutation of its own, those of like lengths together, so
    that little is padded.

    Args:
        lengths: Frames of every sequence ``[sequences]``.
        optim: Gives batch size and the longest window.
        seed: Of the run.
    """

    def __init__(self, lengths: Array, optim: OptimConfig, seed: int) -> None:
        self._batch, self._seed, self._lengths = optim.batch_size, seed, lengths
        pieces = -(-lengths // optim.sequence_length)
        self._sequences = np.repeat(np.arange(len(lengths)), pieces)
        self._windows = np.minimum(lengths, optim.sequence_length)[self._sequences]
        self.mean_length = float(self._windows.mean())
        self.steps_per_epoch = len(self._sequences) // self._batch
        if self.steps_per_epoch < 1:
            raise EdgelinError(
                f"data.train holds {len(self._sequences)} windows, one batch needs {self._batch}; "
                f"lower optim.batch_size, or give more sequences"
            )
        self._epoch = -1
        self._visits = self._offsets = np.empty((0, 0), dtype=np.int64)

    def windows(self, step: int) -> tuple[Array, Array, Array]:
        """Sequence, first frame in it, and length of every row of a step, each ``[batch]``."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._visits, self._offsets = self._visited(epoch)
        rows = self._visits[within]
        return self._sequences[rows], self._offsets[rows], self._windows[rows]

    def _visited(self, epoch: int) -> tuple[Array, Array]:
        """The windows of every step ``[steps, batch]``, and the offset of every window."""
        generator = np.random.default_rng([self._seed, epoch])
        room = self._lengths[self._sequences] - self._windows
        offsets = generator.integers(room + 1)
        count = self.steps_per_epoch * self._batch
        order = generator.permutation(len(room))[:count]
        for start in range(0, count, _POOL * self._batch):
            pool = order[start : start + _POOL * self._batch]
            pool[:] = pool[np.argsort(self._windows[pool], kind="stable")]
        batches = order.reshape(self.steps_per_epoch, self._batch)
        return batches[generator.permutation(self.steps_per_epoch)], offsets


class FeatureTask:
    """A run on features; see :class:`edgelin.train.task.Task`.

    Args:
        config: The run.
        device: Where to train.

    Raises:
        EdgelinError: A file of the data cannot be read or does not fit the model.
    """

    unit = "frames"
    tokenizer_json: str | None = None

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        features, data = config.model.features, config.data
        assert features is not None
        self._train = load(data.train, features).to(device)
        self._valid = load(data.valid, features).to(device) if data.valid else None
        self._order = Order(self._train.lengths, config.optim, config.seed)
        self.metric = _METRICS[features.task]
        self.size = len(self._train.x)
        self.units_per_step = round(config.optim.batch_size * self._order.mean_length)
        self.steps_per_epoch = self._order.steps_per_epoch
        self.has_valid = self._valid is not None
        self.identity: dict[str, Any] = {
            "data.train": "\n".join(sha256(path) for path in data.train),
        }

    @torch.no_grad()
    def initialise(self, model: SequenceModel) -> None:
        """Give the model mean and scale of the training data."""
        assert isinstance(model.embedding, FeatureProjection)
        std, mean = torch.std_mean(self._train.x.double(), 0, correction=0)
        # a constant column stays itself: what float32 rounds off is no deviation
        constant = std <= 1e-6 * mean.abs()
        model.embedding.mean.copy_(mean)
        model.embedding.scale.copy_(torch.where(constant, 1.0, 1 / std))

    def loss(
        self,
        model: SequenceModel,
        hidden_of: Hidden,
        step: int,
        state: State | None,
        *,
        compiled: bool,
    ) -> tuple[torch.Tensor, State]:
        """Mean loss of the wanted answers; every window starts from the initial state."""
        inputs, answers, wanted = self._train.windows(*self._order.windows(step))
        hidden, _ = hidden_of(inputs, model.initial_state(len(inputs), inputs.device))
        outputs, answers = model.logits(hidden[wanted]), answers[wanted]
        if self.metric.name == "accuracy":
            loss = functional.cross_entropy(outputs, answers, reduction="sum")
        else:
            loss = functional.mse_loss(outputs, answers, reduction="sum") / outputs.shape[-1]
        return loss / max(1, len(answers)), {}

    def score(self, model: SequenceModel) -> float:
        """Accuracy or mean squared error of the held-out answers."""
        assert self._valid is not None
        return score(model, self._valid)

    def final_score(self, model: SequenceModel) -> float:
        """The same: all held-out data are read each time."""
        return self.score(model)


@torch.no_grad()
def score(model: SequenceModel, dataset: Dataset) -> float:
    """Accuracy of the wanted answers, or their mean squared error.

    Args:
        model: On the device of the dataset; its mode is put back.
        dataset: Every sequence is read whole from the initial state.
    """
    training = model.training
    model.eval()
    total, count = 0.0, 0
    for rows in _like_lengths(dataset.lengths):
        inputs, answers, wanted = dataset.windows(rows, np.zeros_like(rows), dataset.lengths[rows])
        state, parts = model.initial_state(len(rows), inputs.device), []
        for part in inputs.split(_CHUNK, 1):  # type: ignore[no-untyped-call]
            outputs, state = model(part, state)
            parts.append(outputs)
        outputs, answers = torch.cat(parts, 1)[wanted], answers[wanted]
        if dataset.features.task == "classification":
            total += float((outputs.argmax(-1) == answers).sum())
        else:
            total += float((outputs - answers).double().square().mean(-1).sum())
        count += len(answers)
    model.train(training)
    return total / count


def _like_lengths(lengths: Array) -> list[Array]:
    """The sequences in groups of like lengths, few enough to be read at once."""
    order = np.argsort(lengths, kind="stable")[::-1]
    groups, start = [], 0
    while start < len(order):
        rows = max(1, _FRAMES // int(lengths[order[start]]))
        groups.append(order[start : start + rows])
        start += rows
    return groups
