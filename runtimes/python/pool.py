"""A pool: many streams over one session and one block of memory, advanced together.

Every stream has a slot, a number that is never given out again, and a row of the shared state
tensors. A call reads the front rows, or a single row anywhere; rows change places where a call
needs others, which costs a copy of their states and happens when streams come and go, not at every
step. A row that is not in a call is not touched, bit for bit.

Streams of a call may read different numbers of steps. With 9, 5 and 5 of them to read, all three
rows read 5, then the first one reads 4 more. A graph that takes ``lengths`` may also read all of
them in one call, where that is cheaper; what fills the shorter rows up never reaches their states.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgelin.errors import EdgelinError
from edgelin.runtimes import capsules, state_file
from edgelin.runtimes.buffers import Buffers, Inputs, Outputs, initial_state
from edgelin.runtimes.manifest import Capsule
from edgelin.runtimes.sampler import WINDOW
from edgelin.runtimes.signature import Tokens
from edgelin.runtimes.text import TextTail

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

# What a call costs besides its steps, in steps: about as long as a row takes to read so many.
_CALL_COST = 8


class LostError(EdgelinError):
    """Some streams of a call have lost their states; the others have gone on.

    Attributes:
        slots: The streams that are lost, until they are reset, restored or removed.
        outputs: What :meth:`Pool.feed` would have returned for the others.
    """

    def __init__(self, message: str, slots: Iterable[int], outputs: dict[int, Outputs]) -> None:
        super().__init__(message)
        self.slots, self.outputs = tuple(slots), outputs


@dataclasses.dataclass
class _Row:
    """One stream beside its state tensors."""

    slot: int
    start: state_file.SavedStream | None = None  # the capsule in which it began
    position: int = 0
    outputs: Outputs | None = None  # [size]
    recent: deque[int] = dataclasses.field(default_factory=lambda: deque(maxlen=WINDOW))
    lost: bool = False


class Pool:
    """Streams of one row each that share a session; made by :meth:`Bundle.pool`.

    Any thread may call any method: one lock makes each of them whole, and calls wait for each
    other. A call that is refused changes nothing.
    """

    def __init__(self, bundle: Bundle, slots: int) -> None:
        growing = [s.name for s in bundle.manifest.states if s.growing_axis is not None]
        if growing:
            raise EdgelinError(
                f"a pool needs states of fixed size, and {growing[0]} of {bundle.path} grows with "
                "every token; export with --attention window=N, or use streams"
            )
        self._bundle = bundle
        self._size = slots
        self._buffers = Buffers(bundle.session, bundle.manifest, slots, in_place=bundle.in_place)
        self._rows: list[_Row] = []  # row i of the buffers is that of _rows[i]; the rest is free
        self._capsule: tuple[Capsule, state_file.SavedStream] | None = None  # the last one used
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Streams in the pool."""
        return len(self._rows)

    @property
    def free(self) -> int:
        """Streams that can still be added."""
        return self._size - len(self._rows)

    @property
    def slots(self) -> list[int]:
        """The streams in the pool, oldest first."""
        with self._lock:
            return sorted(row.slot for row in self._rows)

    def add(self, *, capsule: str | None = None) -> int:
        """A new stream; its slot.

        Args:
            capsule: Where it begins, as of :meth:`Bundle.stream`.

        Raises:
            EdgelinError: All slots are taken, or there is no such capsule.
        """
        with self._lock:
            start = self._find(capsule)
            if not self.free:
                raise EdgelinError(
                    f"all {self._size} slots of the pool are taken; remove a stream, or make a "
                    "larger pool"
                )
            row = _Row(next(self._numbers), start)
            self._begin(row, len(self._rows))
            self._rows.append(row)
            return row.slot

    def remove(self, slot: int) -> None:
        """Forget a stream; the others go on as they are."""
        with self._lock:
            at, last = self._at(slot), len(self._rows) - 1
            if at != last:
                self._swap(at, last)
            self._rows.pop()

    def reset(self, slot: int) -> None:
        """Set a stream back to where it began."""
        with self._lock:
            at = self._at(slot)
            self._rows[at] = row = _Row(slot, self._rows[at].start)
            self._begin(row, at)

    def position(self, slot: int) -> int:
        """Tokens or steps that a stream has read."""
        with self._lock:
            return self._row(slot).position

    def outputs(self, slot: int) -> Outputs | None:
        """Logits or outputs [size] after the last step of a stream; None before its first."""
        with self._lock:
            outputs = self._row(slot).outputs
            return None if outputs is None else outputs.copy()

    def recent(self, slot: int) -> list[int]:
        """The last tokens of a stream, as many as a repetition penalty looks at."""
        with self._lock:
            return list(self._row(slot).recent)

    def feed(self, inputs: Mapping[int, ArrayLike]) -> dict[int, Outputs]:
        """Read tokens or features into some streams, as many into each as are given.

        Args:
            inputs: Slot to token ids [T] or features [T, F]; T may differ.

        Returns:
            Slot to logits or outputs [size] of its last step, in the order of ``inputs``.

        Raises:
            LostError: An answer is not finite, or onnxruntime failed: these streams are lost, the
                others have gone on.
            EdgelinError: An input is wrong, or a slot is not in the pool or is lost; nothing was
                read.
        """
        with self._lock:
            steps = {slot: self._check(slot, given) for slot, given in inputs.items()}
            if not steps:
                return {}
            first = self._arrange(steps)
            rows = self._rows[first : first + len(steps)]
            for row in rows:
                row.lost = True  # until it has been read; an exception may come at any time
            try:
                self._read(rows, first, steps)
            except Exception as error:
                raise self._lost(inputs, f"onnxruntime failed: {error}") from error
            if any(row.lost for row in rows):
                raise self._lost(
                    inputs,
                    "outputs are not finite: the inputs are too large, or states or weights are "
                    "damaged",
                )
            return self._answers(inputs)

    def snapshot(self, slot: int) -> state_file.SavedStream:
        """A copy of a stream, for :meth:`restore`, or for a file.

        ``state_file.write(path, pool.snapshot(slot))`` writes what :meth:`Stream.load` reads.

        Raises:
            EdgelinError: The stream has read nothing yet, or is lost.
        """
        with self._lock:
            at = self._at(slot)
            row, manifest = self._rows[at], self._bundle.manifest
            self._refuse_lost(row)
            if row.outputs is None:
                raise EdgelinError(
                    f"slot {slot} has read nothing yet, so there is no state to save"
                )
            is_text = isinstance(manifest.input, Tokens)
            states = zip(manifest.states, self._buffers.states, strict=True)
            return state_file.SavedStream(
                model_hash=manifest.model_hash,
                variant=self._bundle.variant,
                position=row.position,
                text=state_file.TextPart(list(row.recent), TextTail()) if is_text else None,
                tensors={
                    **{spec.name: array[at : at + 1].copy() for spec, array in states},
                    manifest.output.name: row.outputs[None].copy(),
                },
            )

    def restore(self, slot: int, saved: state_file.SavedStream | str | Path) -> None:
        """Go to the state of a snapshot or of a state file; nothing is read again.

        Text that the file holds back belongs to who shows the text: it is ``saved.text.tail``.

        Raises:
            EdgelinError: It is damaged, or of another model or batch size.
        """
        where: str | Path = f"the snapshot for slot {slot}"
        if not isinstance(saved, state_file.SavedStream):
            where, saved = saved, state_file.read(Path(saved))
        manifest = self._bundle.manifest
        state_file.check(saved, where, manifest, variant=self._bundle.variant, batch=1)
        with self._lock:
            at = self._at(slot)
            self._rows[at] = row = _Row(slot, self._rows[at].start)
            self._put(row, at, saved)

    def rest(self, slot: int, *, dtype: str = "float32") -> state_file.Resting:
        """Take a stream out of the pool, and keep it in fewer bytes until :meth:`wake`.

        Args:
            slot: Is free then.
            dtype: As of :meth:`Stream.save`.

        Raises:
            EdgelinError: The stream has read nothing yet, or is lost, or there is no such dtype.
        """
        with self._lock:
            resting = state_file.Resting.of(self.snapshot(slot), dtype)
            self.remove(slot)
            return resting

    def wake(self, resting: state_file.Resting) -> int:
        """Put a stream that rests into a free slot; any number of times. The slot.

        Raises:
            EdgelinError: All slots are taken, or it is of another model.
        """
        with self._lock:
            slot = self.add(capsule=capsules.NONE)
            try:
                self.restore(slot, resting.wake())
            except EdgelinError:
                self.remove(slot)
                raise
            return slot

    def _find(self, name: str | None) -> state_file.SavedStream | None:
        """What a capsule holds, the same object for all streams that begin in it."""
        manifest = self._bundle.manifest
        record = manifest.capsules.get(name or manifest.default_capsule or capsules.NONE)
        if self._capsule is not None and self._capsule[0] == record:
            return self._capsule[1]
        saved = capsules.find(self._bundle, name)
        if saved is not None and record is not None:
            self._capsule = record, saved
        return saved

    def _at(self, slot: int) -> int:
        """The row of a stream."""
        for at, row in enumerate(self._rows):
            if row.slot == slot:
                return at
        have = ", ".join(map(str, self.slots)) or "none"
        raise EdgelinError(f"the pool has no slot {slot!r}; it has: {have}; add one first")

    def _row(self, slot: int) -> _Row:
        """The same as its record."""
        return self._rows[self._at(slot)]

    def _begin(self, row: _Row, at: int) -> None:
        """Put a stream of which nothing is known but its beginning into a row."""
        if row.start is not None:
            self._put(row, at, row.start)
            return
        self._buffers.load([initial_state(s, 1) for s in self._bundle.manifest.states], first=at)

    def _put(self, row: _Row, at: int, saved: state_file.SavedStream) -> None:
        """Put a saved stream into a row."""
        manifest = self._bundle.manifest
        self._buffers.load([saved.tensors[s.name] for s in manifest.states], first=at)
        row.position = saved.position
        row.outputs = saved.tensors[manifest.output.name][0].copy()
        row.recent.extend(saved.text.recent if saved.text else ())

    def _swap(self, one: int, other: int) -> None:
        """Let two rows change places."""
        self._buffers.swap(one, other)
        rows = self._rows
        rows[one], rows[other] = rows[other], rows[one]

    def _check(self, slot: int, given: ArrayLike) -> Inputs:
        """Steps [T, ...] for a stream that can go on."""
        self._refuse_lost(self._row(slot))
        try:
            rows: Inputs = self._bundle.manifest.input.check(given, 1)[0]
        except EdgelinError as error:
            raise EdgelinError(f"slot {slot}: {error}") from None
        row: Inputs = rows[0]
        return row

    def _refuse_lost(self, row: _Row) -> None:
        """Refuse to go on from a state that a failed call left half written."""
        if row.lost:
            raise EdgelinError(
                f"the state of slot {row.slot} is lost by a call that failed; reset or restore it"
            )

    def _arrange(self, steps: Mapping[int, Inputs]) -> int:
        """Bring rows together for a call, those with more steps to read first; the first of them.

        A row that already stands among those with as many steps stays there.
        """
        counts = {slot: len(given) for slot, given in steps.items()}
        if len(counts) == 1:
            return self._at(*counts)
        wanted = sorted(counts.values(), reverse=True)
        for i, count in enumerate(wanted):
            if counts.get(self._rows[i].slot) == count:
                continue
            self._swap(i, next(
                j for j, row in enumerate(self._rows)
                if counts.get(row.slot) == count and (j >= len(wanted) or wanted[j] != count)
            ))  # fmt: skip
        return 0

    def _read(self, rows: list[_Row], first: int, steps: Mapping[int, Inputs]) -> None:
        """Read the steps of neighbouring rows, of which none has more than the one before it."""
        done, source = 0, self._bundle.manifest.input
        while rows:
            lengths = np.array([len(steps[row.slot]) - done for row in rows])
            time = self._call_length(lengths)
            lengths = np.minimum(lengths, time)
            inputs = np.zeros((len(rows), time, *source.step), source.dtype)
            for line, row, length in zip(inputs, rows, lengths, strict=True):
                line[:length] = steps[row.slot][done : done + length]
            outputs = self._buffers.run(inputs, first=first, lengths=lengths)
            done += time
            for row, answer in zip(rows, outputs[:, -1], strict=True):
                if len(steps[row.slot]) <= done and np.isfinite(answer).all():
                    self._finish(row, answer, steps[row.slot])
            rows = [row for row in rows if len(steps[row.slot]) > done]

    def _call_length(self, lengths: NDArray[np.int64]) -> int:
        """Steps of the next call for rows that have still so many to read, descending.

        As many as the shortest has; where rows may be filled up, as many as a longer one has if
        the calls that this saves cost more than the steps that it wastes.
        """
        chunk = self._bundle.manifest.chunk
        times = np.unique(np.minimum(lengths, chunk))
        if self._bundle.manifest.lengths is None:
            return int(times[0])
        wasted = [np.maximum(time - lengths, 0).sum() for time in times]
        gain = [_CALL_COST * i - waste for i, waste in enumerate(wasted)]
        return int(times[np.argmax(gain)])

    def _finish(self, row: _Row, outputs: Outputs, steps: Inputs) -> None:
        """Note that a stream has read all of its steps."""
        row.outputs = outputs.copy()
        row.position += len(steps)
        if isinstance(self._bundle.manifest.input, Tokens):
            row.recent.extend(steps[-WINDOW:].tolist())
        row.lost = False

    def _answers(self, slots: Iterable[int]) -> dict[int, Outputs]:
        """The last outputs of those that are not lost."""
        rows = {row.slot: row for row in self._rows if not row.lost}
        found = {slot: rows[slot].outputs for slot in slots if slot in rows}
        return {slot: outputs.copy() for slot, outputs in found.items() if outputs is not None}

    def _lost(self, slots: Iterable[int], problem: str) -> LostError:
        """The error of a call that some streams did not survive."""
        good = self._answers(slots)
        lost = [slot for slot in slots if slot not in good]
        names = ", ".join(map(str, lost))
        return LostError(
            f"{' '.join(problem.split())}; the state of slot {names} is lost: reset or restore it",
            lost, good,
        )  # fmt: skip
