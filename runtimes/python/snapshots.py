"""How a stream stands at one position, and the way back to positions that it has left.

A recurrent state cannot be unread. So a stream that may have to go back keeps a snapshot every n
positions and what it has read since the oldest; going back to a position restores the nearest
snapshot before it and reads the steps in between again, in the same calls as at first, so that the
numbers are the same bit for bit. Where a position lies within a call that read many steps at once,
its part is read as a call of its own, and the numbers are the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edgelin.errors import EdgelinError
from edgelin.runtimes.buffers import Inputs, Outputs, State, initial_state
from edgelin.runtimes.manifest import Manifest
from edgelin.runtimes.state_file import SavedStream, TextPart
from edgelin.runtimes.text import TextTail


@dataclass(frozen=True)
class Snapshot:
    """All that a stream needs to go on.

    Args:
        position: Tokens or steps read.
        states: State tensors in the order of the manifest, batch first.
        outputs: [batch, size] float32, the last answer; None before the first step.
        recent: The last tokens, oldest first; empty for features.
        tail: Generated text that has not been shown.
    """

    position: int
    states: tuple[State, ...]
    outputs: Outputs | None
    recent: tuple[int, ...] = ()
    tail: TextTail = field(default_factory=TextTail)

    @classmethod
    def initial(cls, manifest: Manifest, batch: int) -> Snapshot:
        """Before the first step."""
        return cls(0, tuple(initial_state(spec, batch) for spec in manifest.states), None)

    @classmethod
    def of(cls, saved: SavedStream, manifest: Manifest) -> Snapshot:
        """What a state file holds, which has passed :func:`state_file.check`."""
        text = saved.text or TextPart([], TextTail())
        states = tuple(saved.tensors[spec.name] for spec in manifest.states)
        outputs = saved.tensors[manifest.output.name]
        return cls(saved.position, states, outputs, tuple(text.recent), text.tail)

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        outputs = 0 if self.outputs is None else self.outputs.nbytes
        return outputs + sum(array.nbytes for array in self.states)

    def rows(self, batch: int) -> Snapshot:
        """The snapshot of one row for each of ``batch`` rows; the tensors are views."""

        def spread(array: Any) -> Any:
            return np.broadcast_to(array, (batch, *array.shape[1:]))

        outputs = None if self.outputs is None else spread(self.outputs)
        return replace(self, states=tuple(map(spread, self.states)), outputs=outputs)


@dataclass(frozen=True)
class Rewound:
    """What going back has cost.

    Args:
        position: Where the stream stands.
        snapshot: Position of the snapshot that was restored.
        replayed: Steps that were read again.
    """

    position: int
    snapshot: int
    replayed: int


@dataclass
class _Segment:
    """A snapshot and what was read from there to the next.

    Args:
        snapshot: Where it begins.
        calls: Inputs [batch, time, ...] of the calls.
        tails: Text that was not shown, at the positions where there was any.
    """

    snapshot: Snapshot
    calls: list[Inputs] = field(default_factory=list)
    tails: dict[int, TextTail] = field(default_factory=dict)

    def upto(self, position: int) -> list[Inputs]:
        """The calls that lead from the snapshot to a position, the last one cut."""
        left, found = position - self.snapshot.position, []
        for call in self.calls:
            if left <= 0:
                break
            found.append(call[:, :left])
            left -= call.shape[1]
        return found


class History:
    """The snapshots of one stream and what it has read since the oldest.

    Args:
        every: Positions between two snapshots, or a few more: one is taken between calls.
        keep: Snapshots at most; the oldest goes, with what was read behind it.
        first: How the stream stands now.
    """

    def __init__(self, every: int, keep: int, first: Snapshot) -> None:
        self.every, self.keep = every, keep
        self._segments = [_Segment(first)]

    @property
    def positions(self) -> list[int]:
        """Where snapshots are, oldest first; no way leads behind the first."""
        return [segment.snapshot.position for segment in self._segments]

    @property
    def nbytes(self) -> int:
        """Memory held by snapshots and inputs."""
        return sum(
            segment.snapshot.nbytes + sum(call.nbytes for call in segment.calls)
            for segment in self._segments
        )

    def before(self, position: int, tail: TextTail, take: Callable[[], Snapshot]) -> None:
        """Note how the stream stands before it reads on; takes a snapshot when one is due."""
        last = self._segments[-1]
        if position - last.snapshot.position >= self.every:
            self._segments.append(_Segment(take()))
            del self._segments[: -self.keep]
        elif (tail.pending or tail.held) and position > last.snapshot.position:
            last.tails.setdefault(position, replace(tail))

    def after(self, inputs: Inputs) -> None:
        """Note what has been read."""
        self._segments[-1].calls.append(inputs.copy())

    def find(self, position: int) -> tuple[Snapshot, list[Inputs], TextTail]:
        """The nearest snapshot, the calls from there to a position, and the text tail there.

        Raises:
            EdgelinError: The position lies before the oldest snapshot.
        """
        near = [segment for segment in self._segments if segment.snapshot.position <= position]
        if not near:
            raise EdgelinError(
                f"position {position} lies before the oldest snapshot, at {self.positions[0]}; "
                "reset the stream, or keep more snapshots"
            )
        snapshot = near[-1].snapshot
        tail = snapshot.tail if snapshot.position == position else near[-1].tails.get(position)
        return snapshot, near[-1].upto(position), replace(tail or TextTail())

    def cut(self, position: int) -> None:
        """Forget what lies behind a position that :meth:`find` can find."""
        self._segments = [s for s in self._segments if s.snapshot.position <= position]
        last = self._segments[-1]
        last.calls = last.upto(position)
        last.tails = {at: tail for at, tail in last.tails.items() if at <= position}

    def copy(self) -> History:
        """The history of a fork: snapshots and inputs are shared, and never written to."""
        twin = History(self.every, self.keep, self._segments[0].snapshot)
        twin._segments = [_Segment(s.snapshot, [*s.calls], {**s.tails}) for s in self._segments]
        return twin
