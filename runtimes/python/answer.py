"""Answers of a model of features, a line a step: what ``edgelin run --features`` does."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelin.errors import EdgelinError
from edgelin.runtimes import feature_file
from edgelin.runtimes.complete import Pace, interruptible
from edgelin.runtimes.distribution import log_softmax
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.signature import Output
from edgelin.runtimes.stream import Stream


def answer(
    bundle: Bundle,
    stream: Stream,
    source: str,
    *,
    as_json: bool,
    emit: Callable[[str], None],
    failed: Callable[[], bool],
) -> tuple[list[Pace], bool]:
    """Read steps as they come and emit a line for each.

    Ctrl-C ends it between two calls, also while it waits for more.

    Args:
        bundle: The model.
        stream: Where to go on; it stands behind the last answered step afterwards.
        source: An ``.npy``, or ``-`` for lines of standard input.
        as_json: Whether the lines are JSON.
        emit: Takes the lines of a call.
        failed: Asked after every call; ends the stream when true.

    Returns:
        The steps and the seconds for them, without those of waiting; whether Ctrl-C was pressed.

    Raises:
        EdgelinError: The bundle reads text; the source cannot be read or does not fit.
    """
    show = partial(json_line if as_json else plain_line, bundle.manifest.output)
    pace, interrupted = Pace("steps", "step"), False
    try:
        for piece in _pieces(bundle, source):
            with interruptible() as pressed:
                begin, before = time.perf_counter(), stream.position
                outputs = stream.feed(piece[None], all_outputs=True)[0]
                pace.count += len(piece)
                pace.seconds += time.perf_counter() - begin
                lines = [show(before + 1 + i, row) for i, row in enumerate(outputs)]
                emit("".join(f"{line}\n" for line in lines))
            interrupted = pressed()
            if interrupted or failed():
                break
    except KeyboardInterrupt:  # while waiting for a piece
        interrupted = True
    return [pace], interrupted


def plain_line(output: Output, position: int, outputs: NDArray[np.float32]) -> str:
    """The likeliest class and its probability, or the numbers of a regression."""
    if not output.is_distribution:
        return " ".join(f"{value:.6g}" for value in outputs)
    best = int(outputs.argmax())
    return f"{output.label(best)}\t{np.exp(log_softmax(outputs)[best]):.4f}"


def json_line(output: Output, position: int, outputs: NDArray[np.float32]) -> str:
    """The same with the position (1 for the first step) and all outputs, as JSON."""
    found: dict[str, Any] = {"position": position}
    if output.is_distribution:
        best = int(outputs.argmax())
        found["label"] = output.label(best)
        found["probability"] = round(float(np.exp(log_softmax(outputs)[best])), 6)
    found["outputs"] = [float(str(value)) for value in outputs]
    return json.dumps(found, ensure_ascii=False)


def _pieces(bundle: Bundle, source: str) -> Iterable[NDArray[Any]]:
    """Steps `[T, F]` for calls: chunks of an ``.npy``, or each line of standard input."""
    wanted = feature_file.check_features(bundle.manifest.input, bundle.path)
    if source == "-":
        return feature_file.parse_steps(_lines(), wanted)
    array = feature_file.read_steps(Path(source))
    try:
        steps = wanted.check(array, 1)[0][0]
    except EdgelinError as error:
        raise EdgelinError(f"{source}: {error}") from None
    chunk = bundle.manifest.chunk
    return (steps[start : start + chunk] for start in range(0, len(steps), chunk))


def _lines() -> Iterator[str]:
    """Lines of standard input as they come."""
    if sys.stdin is None:
        raise EdgelinError("standard input is closed; give an .npy file")
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise EdgelinError(f"standard input is no text: {error.reason}; send numbers") from None
