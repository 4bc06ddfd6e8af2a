"""What ``edgelin run`` does with a model of text: write on from a prompt, or talk."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgelin.runtimes import chat
from edgelin.runtimes.complete import Pace, complete, interruptible
from edgelin.runtimes.sampler import Sampling
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.stream import Stream


@dataclass
class Writer:
    """Emits what the model writes, and saves the state.

    Args:
        bundle: The model.
        stream: Where to go on; it stands behind the last token afterwards.
        sampling: How to write.
        emit: Takes every piece of text.
        failed: Asked after every call of the model; ends the writing when true.
        save_state: Where the state goes after every text; None: nowhere.
        state_dtype: How it is stored.
        end: Emitted behind every text.

    Raises:
        EdgelinError: The bundle reads features.
    """

    bundle: Bundle
    stream: Stream
    sampling: Sampling
    emit: Callable[[str], None]
    failed: Callable[[], bool]
    save_state: Path | None = None
    state_dtype: str = "float32"
    end: str = ""

    def __post_init__(self) -> None:
        _ = self.bundle.text

    def write_on(self, prompt: str | Sequence[int] | None) -> tuple[list[Pace], bool]:
        """Emit what follows a text (None: what the stream has read).

        Returns:
            The tokens read and written, with the seconds for them; whether Ctrl-C was pressed.
        """
        with interruptible() as interrupted:

            def ended() -> bool:
                return interrupted() or self.failed()

            paces = complete(
                self.bundle, self.stream, prompt, self.sampling, emit=self.emit, interrupted=ended
            )
            if self.save_state is not None and self.stream.outputs is not None:
                self.stream.save(self.save_state, dtype=self.state_dtype)
            else:
                self.emit(self.stream.flush())
        self.emit(self.end)
        return paces, interrupted()

    def talk(self, turns: Iterable[str], system: str | None) -> tuple[list[Pace], bool]:
        """Answer one turn after the other; Ctrl-C ends a reply.

        Args:
            turns: What the user says.
            system: What the model is told before the first turn.

        Returns:
            As :meth:`write_on`, of all turns together and of the last reply.
        """
        _ = chat.template_of(self.bundle)  # before anyone is asked to type
        total: list[Pace] = []
        interrupted = False
        for text in turns:
            first = self.stream.position == 0
            ids = chat.turn(self.bundle, text, system=system, first=first)
            system = None
            paces, interrupted = self.write_on(ids)
            total = [a + b for a, b in zip(total, paces, strict=True)] if total else paces
            if self.failed():
                break
        return total, interrupted

    def recommend(self, asked: Iterable[str]) -> None:
        """Sample as the model's authors recommend, but for the settings that were asked for."""
        settings = chat.defaults(self.bundle)
        settings = {name: value for name, value in settings.items() if name not in set(asked)}
        self.sampling = dataclasses.replace(self.sampling, **settings)


def typed_lines() -> Iterator[str]:
    """What a person types, a turn a line, until the end of input or Ctrl-C; without blank lines."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = input()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line.strip():
            yield line


__all__ = ["Writer", "typed_lines"]
