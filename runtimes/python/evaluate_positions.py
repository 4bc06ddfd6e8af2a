"""Bits per byte by position: does a model get worse, or better, far beyond what it was trained on?

The text is cut into streams of one length that all begin anew, several a call. Positions go into
spans that double in length, 1 .. 64, 65 .. 128, 129 .. 256 and so on, and a span has

    bits per byte = sum of -log2 p(token | the stream before it) / UTF-8 bytes of these tokens

over all streams, with the standard error of the streams' own values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from edgelin.errors import EdgelinError
from edgelin.runtimes import checks
from edgelin.runtimes.distribution import log_softmax
from edgelin.runtimes.evaluate import text_tokens
from edgelin.runtimes.measure import save_figure
from edgelin.runtimes.session import Bundle

_FIRST = 64  # positions of the first span
_ROWS = 8  # streams a call


@dataclass(frozen=True)
class Span:
    """Positions that belong together.

    Args:
        first: Counted from 1.
        last: The last of them.
        streams: How many were read.
        bits_per_byte: See the module's docstring.
        standard_error: Of it, over the streams; None: there is one stream.
    """

    first: int
    last: int
    streams: int
    bits_per_byte: float
    standard_error: float | None


def by_position(
    bundle: Bundle, text: str, length: int, *, max_tokens: int | None = None
) -> list[Span]:
    """Measure a bundle on a text that is cut into streams.

    Args:
        bundle: The bundle.
        text: The text; what is left behind the last whole stream is not read.
        length: Tokens of a stream.
        max_tokens: Tokens to read at most.

    Raises:
        EdgelinError: The text is too short for one stream.
    """
    length = checks.positive("by-position", length)
    codec, tokenizer = bundle.text, bundle.manifest.tokenizer
    assert tokenizer is not None  # or the codec had refused
    ids, _ = text_tokens(codec, text, tokenizer.eos_token_id, max_tokens)
    count = (len(ids) - 1) // length
    if count < 1:
        raise EdgelinError(
            f"the text has {len(ids) - 1} tokens, a stream has {length}; give more text, or a "
            f"smaller --by-position"
        )
    targets = ids[1 : 1 + count * length].reshape(count, length)
    sizes = np.array([[len(codec.source_bytes(i)) for i in row] for row in targets.tolist()])
    nats = np.concatenate(
        [
            _nats(bundle, targets[i : i + _ROWS], tokenizer.eos_token_id)
            for i in tqdm(range(0, count, _ROWS), unit="batch", disable=None, leave=False)
        ]
    )
    return [_span(nats, sizes, start, end) for start, end in _spans(length)]


def _nats(bundle: Bundle, targets: NDArray[np.int64], first: int) -> NDArray[np.float64]:
    """-log p of every target [B, T], each row a stream behind the end token."""
    rows = len(targets)
    inputs = np.concatenate([np.full((rows, 1), first), targets[:, :-1]], axis=1)
    stream, chunk, found = bundle.stream(rows, capsule="none"), bundle.manifest.chunk, []
    for start in range(0, targets.shape[1], chunk):
        part = slice(start, start + chunk)
        logs = log_softmax(stream.feed(inputs[:, part], all_logits=True))
        found.append(-np.take_along_axis(logs, targets[:, part, None], axis=-1)[..., 0])
    return np.concatenate(found, axis=1)


def _spans(length: int) -> list[tuple[int, int]]:
    """Starts and ends of the spans."""
    ends = [_FIRST << k for k in range(length.bit_length()) if _FIRST << k < length]
    return list(zip([0, *ends], [*ends, length], strict=True))


def _span(nats: NDArray[Any], sizes: NDArray[Any], start: int, end: int) -> Span:
    """One span of all streams."""
    bits = nats[:, start:end].sum(1) / math.log(2)
    own = bits / np.maximum(sizes[:, start:end].sum(1), 1)
    error = float(own.std(ddof=1) / math.sqrt(len(own))) if len(own) > 1 else None
    total = float(bits.sum() / max(1, sizes[:, start:end].sum()))
    return Span(start + 1, end, len(own), total, error)


def plot(spans: list[Span], title: str, path: Path) -> None:
    """Draw bits per byte against position."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    middle = [math.sqrt(span.first * span.last) for span in spans]
    error = [span.standard_error or 0 for span in spans]
    axis.errorbar(middle, [span.bits_per_byte for span in spans], error, fmt="o-", capsize=3)
    axis.set(title=title, xlabel="position, tokens", ylabel="bits per byte", xscale="log")
    save_figure(figure, path)
