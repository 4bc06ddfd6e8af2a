"""What rounding costs on a text that is read as one stream: bits per byte, KL, first choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgelin import tokenizer as tokenizers
from edgelin.errors import EdgelinError
from edgelin.export.quantise.rollout import Rollout
from edgelin.export.quantise.rounding import Rounded
from edgelin.mapped import Empty, release
from edgelin.runtimes.evaluate import text_tokens
from edgelin.runtimes.text import TextCodec

if TYPE_CHECKING:
    from edgelin.model import SequenceModel
    from edgelin.runtimes.session import Bundle

TOKENS = 16384  # of a text, at most
_POSITIONS = 64  # whose logits are in memory
_LEAST = 256
# The square of the share of first choices that change, for a nat of KL: 0.41 to 0.44 in the demo's
# variants of 4 bits. Searches begin there, and go by what they measure.
_CHANGED = 0.42

Array = NDArray[Any]


@dataclass(frozen=True)
class Loss:
    """A quantised model beside the float one, on the same tokens.

    Args:
        tokens: How many.
        float_bits_per_byte: Of the float model.
        bits_per_byte: Of the quantised one.
        kl: Mean KL(float || quantised) in nat.
        top1: Share of positions where both rank the same token first.
    """

    tokens: int
    float_bits_per_byte: float
    bits_per_byte: float
    kl: float
    top1: float

    @property
    def relative(self) -> float:
        """Relative loss in bits per byte."""
        return self.bits_per_byte / self.float_bits_per_byte - 1


@dataclass(frozen=True)
class Budget:
    """What a quantised model may cost.

    Args:
        relative: Relative loss in bits per byte.
        kl: Mean KL in nat.
        top1: Least share of positions where both models rank the same token first, below 1.
    """

    relative: float | None = None
    kl: float | None = None
    top1: float | None = None

    def spent(self, loss: Loss) -> float:
        """The share of it that a loss takes, as a KL; more than 1: too much."""
        shares = [(loss.relative, self.relative), (loss.kl, self.kl)]
        if self.top1 is not None:
            # First choices change with the size of errors, KL with its square.
            shares.append(((1 - loss.top1) ** 2, (1 - self.top1) ** 2))
        return max(found / limit for found, limit in shares if limit is not None)

    def nats(self, float_nats: float) -> float:
        """About the KL that it allows: the loss in nats grows by that on average."""
        limits = [limit for limit in (self.kl,) if limit is not None]
        if self.relative is not None:
            limits.append(self.relative * float_nats)
        if self.top1 is not None:
            limits.append((1 - self.top1) ** 2 / _CHANGED)
        return min(limits)

    def missed(self, loss: Loss) -> list[str]:
        """In words, what a loss exceeds; NaN exceeds everything."""
        lines = []
        if self.relative is not None and not loss.relative <= self.relative:
            lines.append(
                f"bits per byte grow by {100 * loss.relative:.2f} %, the budget is "
                f"{100 * self.relative:g} %"
            )
        if self.kl is not None and not loss.kl <= self.kl:
            lines.append(f"KL is {loss.kl:.2g} nat, the budget is {self.kl:g}")
        if self.top1 is not None and not loss.top1 >= self.top1:
            lines.append(
                f"{100 * loss.top1:.1f} % of the first choices are the same, the budget asks for "
                f"{100 * self.top1:g} %"
            )
        return lines


class Text:
    """A text in tokens, of which the last quarter measures what was fitted on the others.

    Each of the two parts is read as one stream.

    Args:
        checkpoint: Folder with the tokenizer.
        model: The float model, of text.
        text: What to read; its first ``TOKENS`` tokens are.
        empty: Makes large arrays.

    Raises:
        EdgelinError: The model reads features, or the text is too short.
    """

    def __init__(
        self, checkpoint: Path, model: SequenceModel, text: str, empty: Empty = np.empty
    ) -> None:
        if model.config.features is not None:
            raise EdgelinError(
                f"{checkpoint} reads features, and --calibrate reads text; leave it out"
            )
        codec = TextCodec(checkpoint / "tokenizer.json", model.config.vocab_size)
        end = tokenizers.end_token_id(codec.tokenizer)
        ids, _ = text_tokens(codec, text, end, TOKENS)
        if len(ids) <= _LEAST:
            raise EdgelinError(
                f"the text of --calibrate has {len(ids) - 1} tokens; give {_LEAST} or more, "
                f"better {TOKENS:,}"
            )
        cut = len(ids) * 3 // 4
        self.fitted, self.measured = ids[:cut], ids[cut:]
        self._bytes = sum(map(len, map(codec.source_bytes, self.measured[1:].tolist())))
        self.model, self.empty = model, empty
        self._float: Rollout | None = None

    @cached_property
    def nats(self) -> float:
        """Of the float model, a token."""
        return self._sums(self._wanted)[0] / self._count

    def loss_of_bundle(self, bundle: Bundle) -> Loss:
        """What an opened variant costs."""
        stream = bundle.stream(capsule="none")
        return self._loss(
            lambda at: torch.from_numpy(stream.feed(self.measured[at], all_logits=True))
        )

    def loss_of_rounded(self, rounded: Mapping[str, Rounded]) -> Loss:
        """What the model in torch costs with rounded matrices and activations."""
        reading = self._read(rounded)
        return self._loss(lambda at: reading.logits(at, rounded, noisy=True))

    def _loss(self, logits: Callable[[slice], Tensor]) -> Loss:
        """Compare logits, asked for in the order of positions, with the float model's."""
        wanted, found, kl, same = self._sums(self._wanted, logits)
        count, per_byte = self._count, math.log(2) * self._bytes
        return Loss(count, wanted / per_byte, found / per_byte, kl / count, same / count)

    def _wanted(self, at: slice) -> Tensor:
        """Logits of the float model, which reads the text once."""
        if self._float is None:
            self._float = self._read(None)
        return self._float.logits(at)

    def _read(self, rounded: Mapping[str, Rounded] | None) -> Rollout:
        """Go through all layers, with rounded activations where matrices are rounded."""
        reading = Rollout(self.model, self.measured[:-1], self.empty)
        reading.start(rounded)
        for _ in self.model.blocks:
            reading.read(rounded, noisy=rounded is not None)
        return reading

    def _sums(self, *sources: Callable[[slice], Tensor]) -> tuple[float, float, float, float]:
        """Nats of the first and the last source, their KL and equal first choices, summed."""
        first = last = kl = same = 0.0
        for start in range(0, self._count, _POSITIONS):
            at = slice(start, min(start + _POSITIONS, self._count))
            targets = torch.from_numpy(self.measured[at.start + 1 : at.stop + 1])[:, None]
            logs = [source(at).double().log_softmax(-1) for source in sources]
            p, q = logs[0], logs[-1]
            first -= float(p.gather(1, targets).sum())
            last -= float(q.gather(1, targets).sum())
            kl += float((p.exp() * (p - q)).sum())
            same += float((p.argmax(-1) == q.argmax(-1)).sum())
            release()
        return first, last, kl, same

    @property
    def _count(self) -> int:
        """Tokens that are predicted."""
        return len(self.measured) - 1
