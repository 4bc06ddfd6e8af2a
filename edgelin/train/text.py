"""Training on text: next tokens, shuffled or with the state carried on, bits per byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from edgelin.config import RunConfig
from edgelin.errors import EdgelinError
from edgelin.model import SequenceModel
from edgelin.train.data import Corpus
from edgelin.train.evaluate import Windows, streamed_bits_per_byte
from edgelin.train.loss import cross_entropy
from edgelin.train.order import Order
from edgelin.train.task import Hidden, Metric, State


class TextTask:
    """A run on text; see :class:`edgelin.train.task.Task`.

    Args:
        config: The run.
        corpus: Its tokens.
        device: Where to train.
    """

    unit = "tokens"
    metric = Metric("bits_per_byte")

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device) -> None:
        optim, data = config.optim, config.data
        self._corpus, self._device, self._carry = corpus, device, data.carry_state
        self._texts, self._batch = [Path(name) for name in data.valid], optim.batch_size
        tokens = torch.from_numpy(corpus.train.astype("int32")).to(device)
        self._order = Order(tokens, optim, config.seed, carry_state=data.carry_state)
        self._windows: Windows | None = None
        if corpus.valid is not None:
            self._windows = Windows(
                corpus.valid,
                corpus.tokenizer,
                length=optim.sequence_length,
                budget=config.eval_tokens,
                device=device,
            )
        self.size = len(tokens)
        self.units_per_step = optim.batch_size * optim.sequence_length
        self.steps_per_epoch = self._order.steps_per_epoch
        self.has_valid = self._windows is not None
        self.tokenizer_json: str | None = corpus.tokenizer.to_str(pretty=True)
        self.identity: dict[str, Any] = {
            "data.carry_state": data.carry_state,
            "data.train or tokenizer": corpus.key,
        }

    def initialise(self, model: SequenceModel) -> None:
        """Text gives a model nothing but its loss; a state that grows can't be carried for ever.

        Raises:
            EdgelinError: It should be.
        """
        growing = [spec.layer for spec in model.state_specs() if spec.growing_axis is not None]
        if self._carry and growing:
            raise EdgelinError(
                f"data.carry_state would let the state of layer {growing[0]}, which attends to all "
                f"tokens, grow for the whole run; set data.carry_state = false, or give the "
                f"attention a window"
            )

    def loss(
        self,
        model: SequenceModel,
        hidden_of: Hidden,
        step: int,
        state: State | None,
        *,
        compiled: bool,
    ) -> tuple[torch.Tensor, State]:
        """Mean cross-entropy of the next tokens in nats."""
        inputs, targets = self._order.batch(step)
        if state is None or self._order.begins(step):
            # made outside the compiled function: torch 2.11 miscompiles a constant position
            state = model.initial_state(self._batch, self._device)
        hidden, after = hidden_of(inputs, state)
        loss = cross_entropy(hidden, model.head_weight, targets, compiled=compiled)
        return loss, after if self._carry else {}

    def score(self, model: SequenceModel) -> float:
        """Bits per byte of a fixed sample of the held-out text."""
        assert self._windows is not None
        return self._windows.bits_per_byte(model)

    def final_score(self, model: SequenceModel) -> float:
        """Bits per byte of the whole held-out text, as one stream a file."""
        return streamed_bits_per_byte(
            model, self._corpus.tokenizer, *self._texts, device=self._device
        )
