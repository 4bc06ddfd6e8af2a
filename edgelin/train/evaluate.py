"""Held-out bits per byte: of a few windows while training, of the whole text as one stream after.

bits per byte = sum over tokens of -log2 p(token | all before) / UTF-8 bytes of the text.
The first token is predicted from the end-of-document token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

from edgelin import tokenizer as tokenizers
from edgelin.errors import EdgelinError
from edgelin.model import SequenceModel
from edgelin.train.data import Array, read_text


class Windows:
    """A fixed sample of held-out text, read in windows without carried state.

    Args:
        tokens: Held-out tokens ``[n]``.
        tokenizer: Turns them back into text, to count its bytes.
        length: Tokens predicted a window.
        budget: Tokens predicted in all, at most; the windows are spread evenly over the text.
        device: Where the model is.
    """

    def __init__(
        self,
        tokens: Array,
        tokenizer: tokenizers.Tokenizer,
        *,
        length: int,
        budget: int,
        device: torch.device,
    ) -> None:
        length = min(length, len(tokens) - 1)
        if length < 1:
            raise EdgelinError("data.valid holds no text")
        count = max(1, min(budget // length, (len(tokens) - 1) // length))
        starts = np.linspace(0, len(tokens) - 1 - length, count).astype(np.int64)
        rows = np.stack([tokens[s : s + length + 1] for s in starts]).astype(np.int64)
        texts = tokenizer.decode_batch(rows[:, 1:].tolist(), skip_special_tokens=False)
        self._bytes = sum(len(text.encode()) for text in texts)
        self._rows = torch.from_numpy(rows).to(device)
        self._batch = max(1, 16384 // length)

    @torch.no_grad()
    def bits_per_byte(self, model: SequenceModel) -> float:
        """Measure in evaluation mode, under the autocast that is on; the mode is put back."""
        training = model.training
        model.eval()
        nats = torch.zeros((), dtype=torch.float64, device=self._rows.device)
        for rows in self._rows.split(self._batch):  # type: ignore[no-untyped-call]
            logits, _ = model(rows[:, :-1])
            nats += _nats(logits, rows[:, 1:])
        model.train(training)
        return float(nats) / math.log(2) / self._bytes


@torch.no_grad()
def streamed_bits_per_byte(
    model: SequenceModel,
    tokenizer: tokenizers.Tokenizer,
    *texts: str | Path,
    device: str | torch.device = "cpu",
    chunk: int | None = None,
) -> float:
    """Bits per UTF-8 byte of texts, each read as one stream: batch 1, state carried to its end.

    Args:
        model: In float32 on ``device``; its mode is put back.
        tokenizer: The model's.
        texts: Text (str), or files with it (Path; also .xz or .gz); bits and bytes are summed.
        device: Where the model is.
        chunk: Tokens a call; None is 8192 on a GPU, else 256. Memory grows with it, the result
            does not depend on it beyond rounding.

    Raises:
        EdgelinError: The texts are empty, or a file cannot be read.
    """
    device = torch.device(device)
    size = chunk or (8192 if device.type == "cuda" else 256)
    training = model.training
    model.eval()
    nats = torch.zeros((), dtype=torch.float64, device=device)
    length = 0

    def counted(text: str | Path) -> Iterator[str]:
        nonlocal length
        for block in read_text(text) if isinstance(text, Path) else [text]:
            length += len(block.encode())
            yield block

    with tqdm(unit=" tokens", unit_scale=True, leave=False, disable=None) as bar:
        for text in texts:
            end = np.array([tokenizers.end_token_id(tokenizer)])
            ids = itertools.chain([end], tokenizers.encode(tokenizer, counted(text)))
            state = model.initial_state(1, device)
            for part in _overlapping(ids, size):
                rows = torch.from_numpy(part)[None].to(device)
                logits, state = model(rows[:, :-1], state)
                nats += _nats(logits, rows[:, 1:])
                bar.update(len(part) - 1)
    model.train(training)
    if not length:
        raise EdgelinError("there is no text to measure; give at least one character")
    return float(nats) / math.log(2) / length


def _overlapping(ids: Iterable[Array], size: int) -> Iterator[np.ndarray[Any, Any]]:
    """Regroup into parts of ``size`` + 1 tokens (the last may be shorter) that share one token."""
    buffer = np.empty(0, dtype=np.int64)
    for block in ids:
        buffer = np.concatenate([buffer, block])
        while len(buffer) > size:
            yield buffer[: size + 1]
            buffer = buffer[size:]
    if len(buffer) > 1:
        yield buffer


def _nats(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy in float64, from float32 logits ``[B, T, vocabulary]``."""
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none"
    )
    return losses.sum(dtype=torch.float64)
