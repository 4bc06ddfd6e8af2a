"""A stream: one conversation with a model (or several in step), in constant memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgelin.errors import EdgelinError
from edgelin.runtimes import state_file
from edgelin.runtimes.buffers import Buffers, Ids, Logits, initial_state
from edgelin.runtimes.sampler import WINDOW, Sampler, Sampling
from edgelin.runtimes.text import TextDecoder, TextTail, flush

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

_log = logging.getLogger("edgelin")


class Stream:
    """The state of ``batch`` rows that advance together; made by :meth:`Bundle.stream`.

    Attributes:
        position: Tokens read so far.
        logits: [B, vocab] float32, the prediction of the next token; None before the first.
    """

    def __init__(self, bundle: Bundle, batch: int) -> None:
        self._bundle = bundle
        self._batch = batch
        self._buffers = Buffers(bundle.session, bundle.manifest, batch, in_place=bundle.in_place)
        self._broken = False
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._tail = TextTail()
        self.position = 0
        self.logits: Logits | None = None

    @property
    def state_bytes(self) -> int:
        """Size of the states, which no number of tokens changes."""
        return sum(array.nbytes for array in self._buffers.states)

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1."""
        return self._bundle.manifest.vocab_size

    def states(self) -> dict[str, NDArray[Any]]:
        """Copies of the state tensors by name."""
        names = (spec.name for spec in self._bundle.manifest.states)
        return {name: array.copy() for name, array in zip(names, self._buffers.states, strict=True)}

    def feed(self, ids: ArrayLike, *, all_logits: bool = False) -> Logits:
        """Read tokens. Long inputs are cut into chunks; if one fails, nothing has changed.

        Args:
            ids: [T] (a stream of one row) or [B, T] token ids.
            all_logits: Whether to return the logits of every position, not only of the last.

        Returns:
            Logits of the last position, [vocab] for 1-D ids and [B, vocab] otherwise; with
            ``all_logits`` [T, vocab] or [B, T, vocab].

        Raises:
            EdgelinError: The ids are out of range or have the wrong shape.
        """
        tokens, flat = self._check(ids)
        logits = self._advance(tokens, all_logits)
        return (logits[0] if flat else logits).copy()

    def generate(self, prompt: str | Sequence[int] | None = None, **sampling: Any) -> Iterator[str]:
        """Read a prompt and write on.

        The state then stands behind the last generated token (before an end token). Bytes of a
        character that is not complete, and text that may begin a stop string, wait for the next
        call; :meth:`flush` gives them up.

        Args:
            prompt: Text or token ids; None goes on where the stream stands.
            **sampling: Fields of :class:`~edgelin.runtimes.sampler.Sampling`.

        Returns:
            One piece of text a token, empty while a character or a stop string may be incomplete.

        Raises:
            EdgelinError: A setting is out of range, or there is nothing to go on from.
        """
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
        empty = self.logits is None if prompt is None else _array(prompt).size == 0
        if empty:
            raise EdgelinError("the prompt is empty; give at least one token to go on from")
        tokens = None if prompt is None else self._check(prompt)[0]
        return self._generate(tokens, options)

    def flush(self) -> str:
        """Text that was held back, with U+FFFD for an incomplete character."""
        return flush(self._tail)

    def reset(self) -> None:
        """Go back to the state before the first token."""
        for spec, array in zip(self._bundle.manifest.states, self._buffers.states, strict=True):
            array[...] = initial_state(spec, self._batch)
        self._set(0, None, (), TextTail())

    def fork(self) -> Stream:
        """A second stream in the same state; each goes its own way from here."""
        other = Stream(self._bundle, self._batch)
        for target, source in zip(other._buffers.states, self._buffers.states, strict=True):
            target[...] = source
        tail = TextTail(self._tail.pending, self._tail.held)
        other._set(self.position, self.logits, self._recent, tail)
        return other

    def save(self, path: str | Path) -> None:
        """Write the stream to a state file (see :mod:`edgelin.runtimes.state_file`)."""
        self._refuse_broken()
        if self.logits is None:
            raise EdgelinError("the stream has read nothing yet, so there is no state to save")
        state_file.write(
            Path(path),
            state_file.SavedStream(
                model_hash=self._bundle.manifest.model_hash,
                variant=self._bundle.variant,
                position=self.position,
                recent=list(self._recent),
                tail=self._tail,
                tensors={**self.states(), state_file.LOGITS: self.logits},
            ),
        )

    def load(self, path: str | Path) -> None:
        """Go to the state in a file; no token is read again.

        Raises:
            EdgelinError: The file is damaged, or of another model or batch size.
        """
        saved = state_file.read(Path(path))
        manifest = self._bundle.manifest
        if saved.model_hash != manifest.model_hash:
            raise EdgelinError(
                f"{path} was saved by another model ({saved.model_hash[:12]}, this one is "
                f"{manifest.model_hash[:12]}); a state only fits the model that made it"
            )
        self._check_saved(path, saved)
        if saved.variant != self._bundle.variant:
            _log.warning(
                "Warning: %s was saved by variant %s and goes on with %s; the text may differ",
                path, saved.variant, self._bundle.variant,
            )  # fmt: skip
        for spec, array in zip(manifest.states, self._buffers.states, strict=True):
            array[...] = saved.tensors[spec.name]
        self._set(saved.position, saved.tensors[state_file.LOGITS], saved.recent, saved.tail)

    def _check_saved(self, path: str | Path, saved: state_file.SavedStream) -> None:
        """Refuse tensors of other shapes, and counts and ids that this model cannot have made."""
        manifest = self._bundle.manifest
        logits = np.zeros((self._batch, manifest.vocab_size), np.float32)
        wanted = {
            **{spec.name: initial_state(spec, self._batch) for spec in manifest.states},
            state_file.LOGITS: logits,
        }
        for name, like in wanted.items():
            found = saved.tensors.get(name)
            if found is None or found.shape != like.shape or found.dtype != like.dtype:
                have = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise EdgelinError(
                    f"{path}: tensor {name} is {have}, {like.dtype} {list(like.shape)} is needed; "
                    "the file is of another batch size or damaged"
                )
        counters = [spec.name for spec in manifest.states if spec.kind == "position"]
        if any((saved.tensors[name] != saved.position).any() for name in counters):
            raise EdgelinError(f"{path} is damaged: its positions disagree; save it again")
        if any(not 0 <= token < manifest.vocab_size for token in saved.recent):
            raise EdgelinError(f"{path} is damaged: a recent id is out of range; save it again")

    def _set(
        self, position: int, logits: Logits | None, recent: Sequence[int], tail: TextTail
    ) -> None:
        """Replace what belongs to the stream besides its state tensors."""
        self.position, self.logits, self._tail = position, logits, tail
        self._recent = deque(recent, maxlen=WINDOW)
        self._broken = False

    def _check(self, ids: ArrayLike) -> tuple[Ids, bool]:
        """Ids as [B, T] int64, and whether they came as a list for the one row."""
        array = _array(ids)
        flat = array.ndim == 1 and self._batch == 1
        tokens = array[None] if flat else array
        if tokens.ndim != 2 or tokens.shape[0] != self._batch or tokens.shape[1] == 0:
            allowed = "[time] or [1, time]" if self._batch == 1 else f"[{self._batch}, time]"
            raise EdgelinError(
                f"token ids have shape {list(array.shape)}; {allowed} with time >= 1 is needed"
            )
        if not np.issubdtype(tokens.dtype, np.integer):
            raise EdgelinError(f"token ids are {tokens.dtype}; integers are needed")
        vocab = self.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocab:
            bad = tokens[(tokens < 0) | (tokens >= vocab)][0]
            raise EdgelinError(f"token id {bad} is out of range; the model knows 0 .. {vocab - 1}")
        return tokens.astype(np.int64, copy=False), flat

    def _advance(self, tokens: Ids, all_logits: bool) -> Logits:
        """Run the graph over checked tokens [B, T], a chunk a call."""
        self._refuse_broken()
        time, chunk = tokens.shape[1], self._bundle.manifest.chunk
        # One step in place is not copied first: the copy would cost as much as the recurrence.
        before = [array.copy() for array in self._buffers.states] if time > 1 else None
        pieces = []
        self._broken = True  # until every chunk has run
        try:
            for start in range(0, time, chunk):
                piece = self._buffers.run(tokens[:, start : start + chunk], all_logits=all_logits)
                if all_logits:
                    pieces.append(piece.copy())
        except BaseException as error:
            if before is not None:
                for array, copy in zip(self._buffers.states, before, strict=True):
                    array[...] = copy
            # A failed call leaves the other set of buffers as it was; an interrupt may come later.
            half_done = self._bundle.in_place or not isinstance(error, Exception)
            self._broken = before is None and half_done
            if isinstance(error, Exception):
                raise EdgelinError(f"onnxruntime failed: {' '.join(str(error).split())}") from error
            raise
        self.logits = piece[:, -1].copy()
        self.position += time
        self._recent.extend(tokens[0, -WINDOW:].tolist())
        self._broken = False
        return np.concatenate(pieces, axis=1) if all_logits else self.logits

    def _refuse_broken(self) -> None:
        """Refuse to go on from a state that an interrupted step left half written."""
        if self._broken:
            raise EdgelinError(
                "the last step was interrupted and its state is lost; reset the stream or load one"
            )

    def _generate(self, prompt: Ids | None, options: Sampling) -> Iterator[str]:
        """The loop of :meth:`generate`."""
        if prompt is not None:
            self._tail = TextTail()
            self.feed(prompt)
        sampler = Sampler(options)
        decoder = TextDecoder(self._bundle.text, self._tail, tuple(options.stop))
        for _ in range(options.max_tokens):
            assert self.logits is not None
            token = sampler.choose(self.logits[0], self._recent, self.position)
            if token == self._bundle.manifest.tokenizer.eos_token_id:
                yield self.flush()
                return
            self.feed([token])
            yield decoder.push(token)
            if decoder.stopped:
                return


def _array(ids: ArrayLike) -> NDArray[Any]:
    """Ids as an array of any shape and type."""
    try:
        return np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise EdgelinError(
            f"token ids are no array of integers ({' '.join(str(error).split())}); "
            "give [time] or [batch, time]"
        ) from None
