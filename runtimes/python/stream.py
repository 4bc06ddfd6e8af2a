"""A stream: one conversation with a model, or one stream of features (or several in step)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgelin.errors import EdgelinError
from edgelin.runtimes import chat, checks, state_file, writing
from edgelin.runtimes.buffers import Buffers, Inputs, Outputs
from edgelin.runtimes.sampler import WINDOW, Sampling
from edgelin.runtimes.signature import Input, Tokens
from edgelin.runtimes.snapshots import History, Rewound, Snapshot
from edgelin.runtimes.text import TextTail, flush

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle


class _NotFiniteError(Exception):
    """An answer was NaN or infinite, and so may be the states."""


class Stream:
    """The state of ``batch`` rows that advance together; made by :meth:`Bundle.stream`.

    Attributes:
        position: Tokens or steps read so far.
        outputs: [B, size] float32, the prediction of the next token, or the answer of a model of
            features after the last step; None before the first.
    """

    def __init__(self, bundle: Bundle, batch: int, start: Snapshot | None = None) -> None:
        """A stream that begins before the first token, or as ``start`` stands."""
        self._bundle = bundle
        self._batch = batch
        self._buffers = Buffers(bundle.session, bundle.manifest, batch, in_place=bundle.in_place)
        self._broken = False
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._seen: deque[int] = deque(maxlen=writing.SEEN)
        self._tail = TextTail()
        self._history: History | None = None
        self._start = start
        self.position = 0
        self.outputs: Outputs | None = None
        if start is not None:
            self._restore(start)

    @property
    def logits(self) -> Outputs | None:
        """``outputs`` by the name that a model of text gives them."""
        return self.outputs

    @property
    def state_bytes(self) -> int:
        """Size of the states now; no number of steps changes it, unless one of them grows."""
        return sum(array.nbytes for array in self._buffers.states)

    @property
    def input(self) -> Input:
        """What the stream reads."""
        return self._bundle.manifest.input

    def states(self) -> dict[str, NDArray[Any]]:
        """Copies of the state tensors by name."""
        names = (spec.name for spec in self._bundle.manifest.states)
        return {name: array.copy() for name, array in zip(names, self._buffers.states, strict=True)}

    def feed(
        self, inputs: ArrayLike, *, all_outputs: bool = False, all_logits: bool = False
    ) -> Outputs:
        """Read tokens or features. Long inputs are cut into chunks; if one fails, nothing changes.

        Args:
            inputs: Token ids [T] (a stream of one row) or [B, T]; features [T, F] or [B, T, F].
            all_outputs: Whether to return the outputs of every position, not only of the last.
            all_logits: The same by its name for text.

        Returns:
            Outputs (logits) of the last position, [size], or [B, size] where the inputs have a
            batch axis; with ``all_outputs`` [T, size] or [B, T, size].

        Raises:
            EdgelinError: The inputs are out of range, not finite, or have the wrong shape.
        """
        steps, flat = self.input.check(inputs, self._batch)
        outputs = self._advance(steps, all_outputs or all_logits)
        return (outputs[0] if flat else outputs).copy()

    def generate(self, prompt: str | Sequence[int] | None = None, **sampling: Any) -> Iterator[str]:
        """Read a prompt and write on.

        The state then stands behind the last generated token (before an end token). Bytes of a
        character that is not complete, and text that may begin a stop string, wait for the next
        call; :meth:`flush` gives them up.

        Args:
            prompt: Text or token ids; None goes on where the stream stands.
            **sampling: Fields of :class:`~edgelin.runtimes.sampler.Sampling`.

        Returns:
            One piece of text a token (or for several with ``lookup``), empty while a character or a
            stop string may be incomplete.

        Raises:
            EdgelinError: The model reads features, a setting is out of range, or there is nothing
                to go on from.
        """
        if not isinstance(self.input, Tokens):
            raise EdgelinError("this model reads features and writes no text; use feed")
        if self._batch != 1:
            raise EdgelinError(
                "generate needs a stream of one row; use feed and a sampler of yours"
            )
        try:
            options = Sampling(**sampling)
        except TypeError as error:
            raise EdgelinError(f"generate: {error}; see edgelin.runtimes.sampler") from None
        if isinstance(prompt, str):
            prompt = self._bundle.text.encode(prompt, start=self.position == 0)
        given = self.outputs if prompt is None else prompt
        if given is None or (isinstance(given, Sized) and len(given) == 0):
            raise EdgelinError("the prompt is empty; give at least one token to go on from")
        tokens = None if prompt is None else self.input.check(prompt, 1)[0]
        return self._generate(tokens, options)

    def chat(self, text: str, *, system: str | None = None, **sampling: Any) -> Iterator[str]:
        """Say something to the model in its own format, and read the reply as it comes.

        The state carries the dialogue: only the new turn is read. See
        :mod:`edgelin.runtimes.chat`.

        Args:
            text: What the user says.
            system: What the model is told before the first turn.
            **sampling: As of :meth:`generate`; the others are those of the model's authors.

        Raises:
            EdgelinError: As :meth:`generate`, or the bundle has no chat template.
        """
        ids = chat.turn(self._bundle, text, system=system, first=self.position == 0)
        return self.generate(ids, **{**chat.defaults(self._bundle), **sampling})

    def flush(self) -> str:
        """Text that was held back, with U+FFFD for an incomplete character."""
        return flush(self._tail)

    def reset(self) -> None:
        """Go back to where the stream began: before the first token, or in its capsule."""
        self._restore(self._start or Snapshot.initial(self._bundle.manifest, self._batch))
        self._begin_history()

    def fork(self) -> Stream:
        """A second stream in the same state; each goes its own way from here."""
        other = Stream(self._bundle, self._batch)
        other._start = self._start
        other._restore(self._snapshot(copy=False))
        other._broken = self._broken
        other._history = None if self._history is None else self._history.copy()
        return other

    def checkpoint(self, every: int, *, keep: int = 16) -> None:
        """Take snapshots from here on, so that :meth:`rewind` can go back.

        They cost ``keep`` times the state and what is read meanwhile, see ``history.nbytes``.

        Args:
            every: Tokens or steps between two snapshots, at least; more where a call reads more.
                Going back reads up to as many again.
            keep: Snapshots at most; the way back ends at the oldest.

        Raises:
            EdgelinError: A number is out of range, or the state was lost.
        """
        every, keep = checks.positive("every", every), checks.positive("keep", keep)
        self._refuse_broken()
        self._history = History(every, keep, self._snapshot())

    @property
    def history(self) -> History | None:
        """The snapshots: their ``positions`` and ``nbytes``; None before :meth:`checkpoint`."""
        return self._history

    def rewind(self, position: int) -> Rewound:
        """Go back to a position, by the nearest snapshot before it and reading on from there.

        The stream then goes on as it did from there, also where the last step failed. If reading is
        interrupted, the stream stands at an earlier position.

        Args:
            position: From the oldest snapshot on, up to here.

        Returns:
            Which snapshot was restored, and how many tokens or steps were read again.

        Raises:
            EdgelinError: There is no snapshot, or the position is out of range.
        """
        history = self._history
        if history is None:
            raise EdgelinError("the stream has no snapshots; call checkpoint(every=n) first")
        allowed = f"{history.positions[0]} .. {self.position}"
        position = checks.integer("position", position, allowed)
        within = history.positions[0] <= position <= self.position
        checks.require(within, "position", position, f"{allowed} (from the oldest snapshot on)")
        if position == self.position and not self._broken:
            return Rewound(position, position, 0)
        snapshot, calls, tail = history.find(position)
        self._restore(snapshot)
        self._history = None  # what is read again is known already
        try:
            for call in calls:
                self._advance(call, False)
            self._tail = tail
        finally:
            history.cut(self.position)
            self._history = history
        return Rewound(position, snapshot.position, position - snapshot.position)

    def save(self, path: str | Path, *, dtype: str = "float32") -> None:
        """Write the stream to a state file (see :mod:`edgelin.runtimes.state_file`).

        Args:
            path: The file.
            dtype: How the states are stored: ``"float32"`` goes on exactly, ``"float16"`` and
                ``"int8"`` take about a half and a quarter of the bytes and go on nearly so (see
                :mod:`edgelin.runtimes.state_codec`).

        Raises:
            EdgelinError: The stream has read nothing, or the file cannot be written.
        """
        state_file.write(Path(path), self.saved(), dtype=dtype)

    def saved(self) -> state_file.SavedStream:
        """The content of a state file, as a copy.

        Raises:
            EdgelinError: The stream has read nothing.
        """
        self._refuse_broken()
        if self.outputs is None:
            raise EdgelinError("the stream has read nothing yet, so there is no state to save")
        manifest = self._bundle.manifest
        text = state_file.TextPart(list(self._recent), replace(self._tail))
        return state_file.SavedStream(
            model_hash=manifest.model_hash,
            variant=self._bundle.variant,
            position=self.position,
            text=text if isinstance(self.input, Tokens) else None,
            tensors={**self.states(), manifest.output.name: self.outputs.copy()},
        )

    def load(self, path: str | Path) -> None:
        """Go to the state in a file; no token is read again.

        Raises:
            EdgelinError: The file is damaged, or of another model or batch size.
        """
        self.restore(state_file.read(Path(path)), path)

    def restore(self, saved: state_file.SavedStream, where: str | Path = "the stream") -> None:
        """Go to the state that :meth:`saved` has given.

        Args:
            saved: Of a stream of the same model.
            where: What it is called in errors.

        Raises:
            EdgelinError: It is damaged, or of another model or batch size.
        """
        bundle = self._bundle
        state_file.check(saved, where, bundle.manifest, variant=bundle.variant, batch=self._batch)
        self._restore(Snapshot.of(saved, bundle.manifest))
        self._begin_history()

    def _snapshot(self, *, copy: bool = True) -> Snapshot:
        """How the stream stands; without ``copy`` the states are the buffers themselves."""
        states = tuple(array.copy() if copy else array for array in self._buffers.states)
        outputs = None if self.outputs is None else self.outputs.copy()
        return Snapshot(self.position, states, outputs, tuple(self._recent), replace(self._tail))

    def _restore(self, snapshot: Snapshot) -> None:
        """Stand as a snapshot says."""
        self._buffers.load(snapshot.states)
        self.position = snapshot.position
        self.outputs = None if snapshot.outputs is None else snapshot.outputs.copy()
        self._recent = deque(snapshot.recent, maxlen=WINDOW)
        self._seen = deque(snapshot.recent, maxlen=writing.SEEN)
        self._tail = replace(snapshot.tail)
        self._broken = False

    def _begin_history(self) -> None:
        """Forget the way to where the stream stood; it now stands elsewhere."""
        if self._history is not None:
            self._history = History(self._history.every, self._history.keep, self._snapshot())

    def _advance(self, steps: Inputs, all_outputs: bool) -> Outputs:
        """Run the graph over checked steps [B, T, ...], a chunk a call."""
        self._refuse_broken()
        time, chunk = steps.shape[1], self._bundle.manifest.chunk
        # One step in place is not copied first: the copy would cost as much as the recurrence.
        before = self._snapshot() if time > 1 else None
        pieces = []
        self._broken = True  # until every chunk has run
        try:
            for start in range(0, time, chunk):
                piece = self._call(steps[:, start : start + chunk], all_outputs)
                if all_outputs:
                    pieces.append(piece.copy())
        except BaseException as error:
            if before is not None:
                self._restore(before)
                if self._history is not None:
                    self._history.cut(before.position)
            # A failed call leaves the other set of buffers as it was; an interrupt may come later.
            ran = self._bundle.in_place or not isinstance(error, Exception)
            self._broken = before is None and (ran or isinstance(error, _NotFiniteError))
            if isinstance(error, _NotFiniteError):
                raise EdgelinError(self._not_finite()) from None
            if isinstance(error, Exception):
                raise EdgelinError(f"onnxruntime failed: {' '.join(str(error).split())}") from error
            raise
        self._broken = False
        assert self.outputs is not None
        return np.concatenate(pieces, axis=1) if all_outputs else self.outputs

    def _call(self, steps: Inputs, all_outputs: bool) -> Outputs:
        """One call of the graph, and what the stream knows after it."""
        self._remember()
        piece = self._buffers.run(steps, all_outputs=all_outputs)
        if not np.isfinite(piece[:, -1]).all():
            raise _NotFiniteError
        self.outputs = piece[:, -1].copy()
        self.position += steps.shape[1]
        if steps.ndim == 2:  # tokens
            self._recent.extend(steps[0, -WINDOW:].tolist())
            self._seen.extend(steps[0].tolist())
        if self._history is not None:
            self._history.after(steps)
        return piece

    def _remember(self) -> None:
        """Have the history note how the stream stands, before that changes."""
        if self._history is not None:
            self._history.before(self.position, self._tail, self._snapshot)

    def _not_finite(self) -> str:
        """What went wrong when an answer is NaN or infinite, and what to do."""
        lost = f"; its state is lost, {self._way_back()}" if self._broken else ""
        return (
            f"the model's outputs are not finite after position {self.position}: the inputs are "
            f"too large, or its states or weights are damaged{lost}"
        )

    def _way_back(self) -> str:
        """What to do when the state is lost."""
        return f"{'rewind, ' if self._history is not None else ''}reset the stream or load one"

    def _refuse_broken(self) -> None:
        """Refuse to go on from a state that an interrupted step left half written."""
        if self._broken:
            raise EdgelinError(
                f"the last step failed or was interrupted and its state is lost; {self._way_back()}"
            )

    def _generate(self, prompt: Inputs | None, options: Sampling) -> Iterator[str]:
        """The loop of :meth:`generate`."""
        if prompt is not None:
            self._remember()
            self._tail = TextTail()
            self.feed(prompt)
        yield from writing.write(self, options)
