"""A stream of a million tokens through a bundle: ranges of its states, memory and step time.

The same inputs stand at every position, however often they are asked for, so that a stream goes on
where it stopped and a float64 model can read them after it (:mod:`edgelin.export.soak_reference`).
Every ``LOOK`` steps the states and the last answer are looked at; at positions that double from one
to the next a :class:`Point` is recorded and the whole stream kept as a state file, a *mark*.

Files of a soak, in a folder of its own: ``progress.json`` (all that is known so far),
``stream-<position>.state`` (where the stream goes on) and ``marks/<position>.state``. The state
file is written before ``progress.json`` names it, so that whatever ends the process, the two agree.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

from edgelin.errors import EdgelinError
from edgelin.runtimes import checks
from edgelin.runtimes.distribution import log_softmax
from edgelin.runtimes.measure import write_json
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.signature import Features
from edgelin.runtimes.stream import Stream

LOOK = 64  # steps between two looks at states and answers
PROGRESS = "progress.json"
_SEED = 7
_SAVE_EVERY = 15.0  # seconds; what a killed process loses
_TIMES = 256  # looks whose median is a point's step time

Array = NDArray[Any]


@dataclass(frozen=True)
class Source:
    """The inputs of a stream: given steps again and again, or random tokens.

    Args:
        label: What they are, in words.
        digest: Of all that decides them.
        steps: ``[N]`` tokens or ``[N, F]`` features that repeat; None: random tokens.
        vocabulary: Random tokens are below this.
    """

    label: str
    digest: str
    steps: Array | None
    vocabulary: int

    @classmethod
    def of(cls, bundle: Bundle, steps: ArrayLike | None, label: str) -> Source:
        """Steps of the bundle's kind, named ``label``; None: random tokens.

        Raises:
            EdgelinError: There are no steps: none were given for features, or it is empty.
        """
        source = bundle.manifest.input
        if steps is not None and not len(np.asarray(steps)):
            raise EdgelinError(f"{label} is empty; give at least one {source.unit}")
        if steps is not None:
            rows = source.check(steps, 1)[0][0]
            digest = sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()
            return cls(f"{label}, {len(rows):,} {source.unit}s, repeated", digest, rows, 0)
        if isinstance(source, Features):
            raise EdgelinError(f"{bundle.path} reads features; give them with --features")
        return cls("random tokens", f"random {_SEED}", None, source.vocab_size)

    def read(self, position: int, count: int) -> Array:
        """The steps from a position on; a random one depends on its position alone."""
        if self.steps is not None:
            return np.take(self.steps, range(position, position + count), axis=0, mode="wrap")
        first = position // LOOK
        blocks = range(first, -(-(position + count) // LOOK))
        drawn = [
            np.random.default_rng([_SEED, block]).integers(0, self.vocabulary, LOOK)
            for block in blocks
        ]
        return np.concatenate(drawn)[position - first * LOOK :][:count]


@dataclass(frozen=True)
class Point:
    """What was seen at one position of the stream.

    Args:
        position: Steps read.
        run: Which start of the process this was; memory is comparable within one.
        step_ms: Time of a step, median of the last looks.
        rss_bytes: Resident memory of the process.
        entropy: Mean entropy of the answers since the point before, in nat; None in a regression.
        norms: State to its Euclidean norm here.
        largest: State to its largest magnitude at any look since the point before.
    """

    position: int
    run: int
    step_ms: float
    rss_bytes: int
    entropy: float | None
    norms: dict[str, float]
    largest: dict[str, float]


@dataclass
class Progress:
    """All that a soak knows; the content of ``progress.json``.

    Args:
        model_hash: Of the bundle.
        variant: That streams.
        source: Digest of the inputs.
        label: The inputs in words.
        one_by_one: Whether steps were fed one a call, not ``LOOK`` at a time.
        position: Steps read.
        run: Starts of the process so far.
        failure: Why the stream cannot go on; None: it can.
        points: In order.
        entropies: Sum and number of the entropies since the last point.
        largest: State to its largest magnitude since the last point.
    """

    model_hash: str
    variant: str
    source: str
    label: str
    one_by_one: bool
    position: int = 0
    run: int = 0
    failure: str | None = None
    points: list[Point] = field(default_factory=list)
    entropies: tuple[float, int] = (0.0, 0)
    largest: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Read the file back.

        Raises:
            EdgelinError: It is damaged.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content["points"] = [Point(**point) for point in content["points"]]
            content["entropies"] = tuple(content["entropies"])
            return cls(**content)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise EdgelinError(
                f"{path} is damaged: {error}; remove {path.parent} to start again"
            ) from error

    def check(self, other: Progress, folder: Path) -> None:
        """Refuse to go on with another model or other inputs than those of ``other``, new ones."""
        for name in ("model_hash", "variant", "source", "one_by_one"):
            one, two = getattr(self, name), getattr(other, name)
            if one != two:
                raise EdgelinError(
                    f"{folder} holds a soak with {name} {str(one)[:40]}, this one has "
                    f"{str(two)[:40]}; choose another --out, or remove the folder"
                )


class Soak:
    """One stream under way; made from an opened bundle and its inputs.

    Args:
        bundle: The opened variant.
        source: Its inputs.
        folder: Of the soak; made if it is missing, and gone on with if there is one.
        one_by_one: Whether to feed steps one a call.

    Raises:
        EdgelinError: The folder holds a soak of something else, or is damaged.
    """

    def __init__(
        self, bundle: Bundle, source: Source, folder: Path, *, one_by_one: bool = False
    ) -> None:
        self.bundle, self.source, self.folder = bundle, source, folder
        self._stream: Stream = bundle.stream(capsule="none")
        progress = Progress(
            bundle.manifest.model_hash, bundle.variant, source.digest, source.label, one_by_one
        )
        if (folder / PROGRESS).is_file():
            found = Progress.read(folder / PROGRESS)
            found.check(progress, folder)
            progress = found
            if progress.position and progress.failure is None:
                self._stream.load(self._state(progress.position))
        elif folder.exists() and any(folder.iterdir()):
            raise EdgelinError(f"{folder} is no soak, and not empty; choose another --out")
        progress.run += 1
        self.progress = progress
        self._times: deque[float] = deque(maxlen=_TIMES)
        self._process = psutil.Process()

    def run(self, tokens: int, asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        """Stream up to a position, or until asked to stop or an answer or a state is not finite.

        Raises:
            EdgelinError: ``tokens`` is no position, or a file cannot be written.
        """
        tokens = checks.positive("tokens", tokens)
        progress, saved = self.progress, time.monotonic()
        points = set(positions(tokens))
        (self.folder / "marks").mkdir(parents=True, exist_ok=True)
        with tqdm(
            total=tokens, initial=progress.position, unit="token", disable=None, leave=False
        ) as bar:
            while progress.position < tokens and progress.failure is None:
                if asked_to_stop():
                    break
                count = min(LOOK - progress.position % LOOK, tokens - progress.position)
                self._advance(count)
                bar.update(count)
                if progress.failure is None and progress.position in points:
                    self._record()
                if time.monotonic() - saved > _SAVE_EVERY:
                    self._save()
                    saved = time.monotonic()
        self._save()

    def _advance(self, count: int) -> None:
        """Read some steps and look at what came of them."""
        steps = self.source.read(self.progress.position, count)
        size = 1 if self.progress.one_by_one else count
        start = time.perf_counter()
        try:
            for first in range(0, count, size):
                self._stream.feed(steps[first : first + size])
        except EdgelinError as error:
            if "not finite" not in str(error):
                raise
            self.progress.failure = str(error)
            return
        self._times.append((time.perf_counter() - start) / count)
        self.progress.position += count
        self._look()

    def _look(self) -> None:
        """Note the largest value of every state, and the entropy of the last answer."""
        progress = self.progress
        for name, state in self._numbers():
            largest = float(max(state.max(initial=0), -state.min(initial=0)))
            if not np.isfinite(largest):
                progress.failure = f"{name} is not finite after position {progress.position}"
            progress.largest[name] = max(largest, progress.largest.get(name, 0.0))
        if self.bundle.manifest.output.is_distribution:
            assert self._stream.outputs is not None
            logs = log_softmax(self._stream.outputs[0])
            total, count = progress.entropies
            progress.entropies = (total - float((np.exp(logs) * logs).sum()), count + 1)

    def _record(self) -> None:
        """Add a point and keep a mark here."""
        progress = self.progress
        total, count = progress.entropies
        progress.points.append(
            Point(
                position=progress.position,
                run=progress.run,
                step_ms=1e3 * float(np.median(self._times)),
                rss_bytes=self._process.memory_info().rss,
                entropy=total / count if count else None,
                norms={name: _norm(state) for name, state in self._numbers()},
                largest=progress.largest,
            )
        )
        progress.largest, progress.entropies = {}, (0.0, 0)
        self._stream.save(mark(self.folder, progress.position))

    def _numbers(self) -> list[tuple[str, Array]]:
        """The states that are no positions."""
        states = self._stream.states().items()
        return [(name, state) for name, state in states if state.dtype == np.float32]

    def _save(self) -> None:
        """Write how the stream stands, then what is known, and then drop the older stream."""
        progress = self.progress
        if progress.failure is None and progress.position:
            self._stream.save(self._state(progress.position))
        write_json(asdict(progress), self.folder / PROGRESS)
        for path in self.folder.glob("stream-*.state"):
            if path != self._state(progress.position):
                path.unlink()

    def _state(self, position: int) -> Path:
        """The file of the stream at a position."""
        return self.folder / f"stream-{position}.state"


def _norm(state: Array) -> float:
    """In float64: that of large states must not overflow."""
    return float(np.linalg.norm(state.astype(np.float64)))


def positions(tokens: int) -> list[int]:
    """Where points stand: 64, 128, 256, ... and the end."""
    doubled = [LOOK << k for k in range(tokens.bit_length()) if LOOK << k < tokens]
    return [*doubled, tokens]


def mark(folder: Path, position: int) -> Path:
    """The state file of a point."""
    return folder / "marks" / f"{position}.state"
