"""Writing on from a stream: one token a step, or several where what comes next was read before.

Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; speculation is that of
Leviathan et al. 2022, arXiv:2211.17192): where the last three tokens stand earlier in what the
stream has read, it guesses that the same follows, reads the guess in one call with the token that
it has chosen, chooses after every part of it, and keeps as many as it has chosen itself. From the
first other one on the call is undone: the states are copied before it, and what is kept is read
again. So the tokens are those of single steps, as far as a call of several steps gives the numbers
of single ones: up to rounding, which only equally likely tokens can tell. Draws would tell it, so
that guesses are for the likeliest token alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgelin.errors import EdgelinError
from edgelin.runtimes.sampler import WINDOW, Sampler, Sampling
from edgelin.runtimes.text import TextDecoder

if TYPE_CHECKING:
    from edgelin.runtimes.stream import Stream

SEEN = 2048  # tokens behind which a guess is looked for
_KEY = 3  # tokens that must be the same before a guess
_FIRST = 4  # tokens of the first guess
_LONGEST_WAIT = 32


class Guesses:
    """How long guesses are: twice as long after a right one, and rarer after wrong ones.

    Args:
        most: Tokens of a guess at most; 0: none.
    """

    def __init__(self, most: int) -> None:
        self._most, self._length = most, min(_FIRST, most)
        self._wait = self._pause = 0

    def next(self, seen: Sequence[int], room: int) -> list[int]:
        """What may follow; nothing where that is not worth trying.

        Args:
            seen: The tokens before it, oldest first.
            room: Tokens at most.
        """
        length = min(self._length, room)
        if length <= 0:
            return []
        if self._pause:
            self._pause -= 1
            return []
        return guess(seen, length)

    def judge(self, guessed: int, right: int) -> None:
        """Learn from a guess of so many tokens, of which the first were right."""
        self._length = min(self._most, 2 * guessed) if right == guessed else max(1, right)
        self._wait = 0 if right else min(_LONGEST_WAIT, 2 * self._wait + 1)
        self._pause = self._wait


def guess(seen: Sequence[int], length: int) -> list[int]:
    """What followed the last three tokens when they stood there the last time, or nothing.

    Where less has followed than asked for, the text between has begun to repeat, and is repeated.
    """
    tokens = np.array(seen, np.int64)
    starts = len(tokens) - _KEY  # of windows that something follows
    if starts <= 0:
        return []
    same = np.ones(starts, bool)
    for offset in range(_KEY):
        same &= tokens[offset : offset + starts] == tokens[starts + offset]
    found = np.flatnonzero(same)
    if not found.size:
        return []
    followed = tokens[found[-1] + _KEY :]
    return [int(token) for token in np.resize(followed, length)]


def write(stream: Stream, options: Sampling) -> Iterator[str]:
    """The text that a stream of one row writes on; it stands behind its last token then."""
    tokenizer = stream._bundle.manifest.tokenizer
    ends = frozenset() if tokenizer is None else tokenizer.ends
    sampler = Sampler(options)
    decoder = TextDecoder(stream._bundle.text, stream._tail, tuple(options.stop))
    # A longer guess would take several calls, and the outputs of all of its tokens.
    guesses = Guesses(min(options.lookup, stream._bundle.manifest.chunk - 1))
    left = options.max_tokens
    while left and not decoder.stopped:
        if stream.outputs is None:  # whoever reads the text has set the stream back meanwhile
            raise EdgelinError(
                "the stream was set back to where nothing is read, so the text cannot go on; "
                "generate again"
            )
        token = sampler.choose(stream.outputs[0], stream._recent, stream.position)
        if token in ends:
            yield stream.flush()
            return
        allowed = options.lookup and stream.history is None
        guessed = guesses.next([*stream._seen, token], left - 1) if allowed else []
        if guessed:
            before = stream.position
            text, right = _read_guess(stream, token, guessed, sampler, decoder, ends)
            guesses.judge(len(guessed), right)
            left -= stream.position - before
            yield text
        else:
            left -= 1
            stream.feed([token])
            yield decoder.push(token)


def _read_guess(
    stream: Stream,
    token: int,
    guessed: list[int],
    sampler: Sampler,
    decoder: TextDecoder,
    ends: frozenset[int],
) -> tuple[str, int]:
    """Read a token and as much of a guess as is right; its text, and how much that is.

    If it is interrupted, the stream stands where it stood.
    """
    before, seen = stream._snapshot(), stream._seen.copy()
    recent = deque(stream._recent, WINDOW)
    try:
        logits = stream.feed([token, *guessed], all_outputs=True)
        kept = [token]
        for expected, row in zip(guessed, logits, strict=False):
            recent.append(kept[-1])
            drawn = sampler.choose(row, recent, before.position + len(kept))
            if drawn != expected or drawn in ends:
                break
            kept.append(drawn)
        right = len(kept) - 1
        text = ""
        for at, each in enumerate(kept):
            text += decoder.push(each)
            if decoder.stopped:
                del kept[at + 1 :]
        if len(kept) <= len(guessed):
            tail = stream._tail
            stream._restore(before)
            stream._seen = seen
            stream.feed(kept)
            stream._tail = tail
    except BaseException:
        stream._restore(before)
        raise
    return text, right
