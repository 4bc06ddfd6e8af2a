"""One completion from a prompt to its end, with its speed: what ``edgelin run`` does."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType

import psutil

from edgelin.errors import EdgelinError
from edgelin.runtimes.sampler import Sampling
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.stream import Stream


@dataclass
class Pace:
    """How fast a part of a run was.

    Args:
        name: ``"prefill"`` (reading a prompt), ``"decode"`` (writing, with sampling and printing),
            ``"steps"`` (reading features).
        unit: ``"token"`` or ``"step"``.
        count: How many.
        seconds: Time for them.
    """

    name: str
    unit: str
    count: int = 0
    seconds: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        """Both parts together."""
        return Pace(self.name, self.unit, self.count + other.count, self.seconds + other.seconds)

    def __str__(self) -> str:
        measured = self.count and self.seconds > 0
        rate = f"{self.count / self.seconds:.1f}" if measured else "-"
        return f"{self.name:<9}{self.count} {self.unit}s, {rate} {self.unit}s/s"


def complete(
    bundle: Bundle,
    stream: Stream,
    prompt: str | Sequence[int] | None,
    sampling: Sampling,
    *,
    emit: Callable[[str], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Pace]:
    """Read a prompt and write on, until the end token, a stop string or ``max_tokens``.

    Args:
        bundle: The model.
        stream: Where to go on; it stands behind the last token afterwards.
        prompt: Text or token ids; None goes on from a loaded stream.
        sampling: How to write.
        emit: Takes every piece of text.
        interrupted: Asked after every call of the model; ends the completion when true.

    Raises:
        EdgelinError: The prompt is empty.
    """
    if isinstance(prompt, str):
        prompt = bundle.text.encode(prompt, start=stream.position == 0)
    ids = [] if prompt is None else list(prompt)
    if not ids and (prompt is not None or stream.outputs is None):
        raise EdgelinError("the prompt is empty; give text of at least one character")
    if ids:
        stream.flush()  # what an earlier text left unfinished does not belong to this one
    begin, chunk, before = time.perf_counter(), bundle.manifest.chunk, stream.position
    for start in range(0, len(ids), chunk):
        if interrupted():
            break
        stream.feed(ids[start : start + chunk])
    middle, read = time.perf_counter(), stream.position
    if not interrupted():
        for piece in stream.generate(**asdict(sampling)):
            emit(piece)
            if interrupted():
                break
    end = time.perf_counter()
    return [
        Pace("prefill", "token", read - before, middle - begin),
        Pace("decode", "token", stream.position - read, end - middle),
    ]


def statistics(bundle: Bundle, stream: Stream, paces: list[Pace]) -> list[str]:
    """Lines for ``--stats``."""
    rss = psutil.Process().memory_info().rss
    return [
        *map(str, paces),
        f"state    {stream.state_bytes} bytes at position {stream.position}",
        f"memory   {rss / 2**20:.1f} MiB resident",
        f"variant  {bundle.variant}, {bundle.threads} threads, "
        f"states {'in place' if bundle.in_place else 'in two buffers'}",
    ]


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within it, the first Ctrl-C only sets what the yielded function returns.

    A KeyboardInterrupt could come between a step and its bookkeeping; this way a step is whole. A
    second Ctrl-C interrupts at once.
    """
    seen = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, previous)
