"""What differs between text and features in a training run, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from edgelin.model import SequenceModel

State = dict[str, torch.Tensor]
Hidden = Callable[[torch.Tensor, State], tuple[torch.Tensor, State]]


@dataclass(frozen=True)
class Metric:
    """A held-out score.

    Args:
        name: Its key in the log.
        higher_is_better: Whether the largest is the best.
    """

    name: str
    higher_is_better: bool = False

    @property
    def words(self) -> str:
        """The name for people."""
        return self.name.replace("_", " ")

    def improves(self, score: float, best: float | None) -> bool:
        """Whether a score is better than the best so far (None: there is none)."""
        if best is None:
            return True
        return score > best if self.higher_is_better else score < best


class Task(Protocol):
    """The data of a run and what is made of it.

    Attributes:
        unit: What the log counts, a plural.
        size: Units in the training data.
        units_per_step: Units that an optimizer step reads, on average.
        steps_per_epoch: Optimizer steps that read the training data once.
        metric: Of the held-out data.
        has_valid: Whether there are held-out data.
        tokenizer_json: Content of the checkpoint's ``tokenizer.json``; None: it has none.
        identity: What must not change when a run is resumed, besides model, seed and batch.
    """

    unit: str
    size: int
    units_per_step: int
    steps_per_epoch: int
    metric: Metric
    has_valid: bool
    tokenizer_json: str | None
    identity: dict[str, Any]

    def initialise(self, model: SequenceModel) -> None:
        """Put into a new model what it takes from the training data."""

    def loss(
        self,
        model: SequenceModel,
        hidden_of: Hidden,
        step: int,
        state: State | None,
        *,
        compiled: bool,
    ) -> tuple[torch.Tensor, State]:
        """Loss of a step, a pure function of weights, ``step``, ``state`` and torch's seed.

        Args:
            model: Its head makes the loss.
            hidden_of: ``model.hidden``, or a compiled form of it.
            step: Optimizer steps done.
            state: What the step before gave; None at the start.
            compiled: Whether the loss is to be compiled too.

        Returns:
            The loss, and the recurrent states after the step, to be carried on; empty: none are.
        """

    def score(self, model: SequenceModel) -> float:
        """The metric on held-out data, quickly; the model's mode is put back."""

    def final_score(self, model: SequenceModel) -> float:
        """The metric on all held-out data."""
