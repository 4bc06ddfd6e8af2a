"""Choosing the next token from logits.

The filters come in the order of Hugging Face: repetition penalty (Keskar et al. 2019,
arXiv:1909.05858, equation of section 4.1), temperature, top-k, top-p (Holtzman et al. 2020,
arXiv:1904.09751, equations 2 and 3), min-p (Nguyen et al. 2024, arXiv:2407.01082). The random
number of a position depends on the seed and the position alone (splitmix64), so that a stream
which was saved and loaded goes on as if it had never stopped, in any language.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgelin.errors import EdgelinError
from edgelin.runtimes import checks

_LARGEST = np.finfo(np.float64).max
WINDOW = 64  # tokens that the repetition penalty looks back, as in llama.cpp


@dataclass(frozen=True)
class Sampling:
    """How text is generated.

    Args:
        max_tokens: Tokens to generate at most.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Keeps the k likeliest tokens; 0 keeps all.
        top_p: Keeps the fewest tokens whose probabilities reach top_p; 1 keeps all.
        min_p: Keeps tokens at least min_p times as likely as the likeliest; 0 keeps all.
        repetition_penalty: Above 1 makes the last ``WINDOW`` tokens less likely; 1 does nothing.
        seed: Makes sampling repeatable; None, or none given, draws a new seed.
        stop: Strings (or one string) that end the text and are not part of it.
        lookup: Tokens at most that are guessed from what was read before, and read in one call; 0
            guesses none. Only with temperature 0: the text is the same, and comes faster where it
            repeats what was read (see :mod:`edgelin.runtimes.writing`). Streams that take snapshots
            guess none.
    """

    max_tokens: int = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    lookup: int = 0

    def __post_init__(self) -> None:
        """Check every setting, and turn numpy's numbers into plain ones."""
        for name, allowed, good in _INTEGERS:
            value = getattr(self, name)
            if name == "seed" and value is None:
                value = secrets.randbits(32)
            found = checks.integer(name, value, allowed)
            checks.require(good(found), name, found, allowed)
            object.__setattr__(self, name, found)
        for name, allowed, fits in _NUMBERS:
            value = getattr(self, name)
            real = checks.number(name, value, allowed)
            checks.require(fits(real), name, value, allowed)
            object.__setattr__(self, name, real)
        greedy = self.temperature == 0
        checks.require(greedy or not self.lookup, "lookup", self.lookup, "0, but for temperature 0")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        checks.require(isinstance(stop, tuple | list), "stop", stop, "a text or a list of texts")
        for text in stop:
            good_text = isinstance(text, str) and text != ""
            checks.require(good_text, "stop", text, "texts of one character or more")
        object.__setattr__(self, "stop", tuple(stop))


_INTEGERS: tuple[tuple[str, str, Callable[[int], bool]], ...] = (
    ("max_tokens", "0 or more", lambda x: x >= 0),
    ("top_k", "0 (off) or more", lambda x: x >= 0),
    ("seed", "0 .. 2^64 - 1", lambda x: 0 <= x < 2**64),
    ("lookup", "0 (off) or more", lambda x: x >= 0),
)
_NUMBERS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("temperature", "0 or more", lambda x: x >= 0),
    ("top_p", "above 0 and at most 1", lambda x: 0 < x <= 1),
    ("min_p", "0 .. 1", lambda x: 0 <= x <= 1),
    ("repetition_penalty", "above 0", lambda x: x > 0),
)


class Sampler:
    """Draws tokens as a :class:`Sampling` says."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def choose(self, logits: NDArray[np.float32], recent: Iterable[int], position: int) -> int:
        """The next token.

        Args:
            logits: [vocab] float32.
            recent: The last ``WINDOW`` tokens of the stream.
            position: Number of tokens that the stream has read.

        Raises:
            EdgelinError: A logit is NaN or infinite.
        """
        if not np.isfinite(logits).all():
            raise EdgelinError(
                f"the model's logits are not finite at position {position}; the model is broken "
                "or its state overflowed: check it with `edgelin verify`"
            )
        options = self._sampling
        scores = _penalised(logits.astype(np.float64), recent, options.repetition_penalty)
        if options.temperature == 0:
            return int(scores.argmax())
        tokens, probabilities = _candidates(_tempered(scores, options.temperature), options.top_k)
        keep = _kept(probabilities, options.top_p, options.min_p)
        cumulative = np.cumsum(probabilities[:keep])
        assert options.seed is not None  # drawn when the settings were made
        drawn = uniform(options.seed, position) * cumulative[-1]
        return int(tokens[np.searchsorted(cumulative, drawn, side="right").clip(0, keep - 1)])


def uniform(seed: int, position: int) -> float:
    """The ``position``-th output of splitmix64 started at ``seed``, as a number in [0, 1)."""
    mask = 2**64 - 1
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return float((z ^ (z >> 31)) >> 11) * 2.0**-53


def _penalised(
    scores: NDArray[np.float64], recent: Iterable[int], penalty: float
) -> NDArray[np.float64]:
    """Scores with those of recent tokens made smaller."""
    if penalty != 1:
        seen = np.array(sorted(set(recent)), np.int64)
        with np.errstate(over="ignore"):
            changed = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
        scores[seen] = changed.clip(-_LARGEST, _LARGEST)
    return scores


def _tempered(scores: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Scores divided by the temperature, or their limit for one so small that they overflow."""
    with np.errstate(over="ignore"):
        scaled = scores / temperature
        if not np.isfinite(scaled).all():
            scaled = ((scores - scores.max()) / temperature).clip(-_LARGEST, _LARGEST)
    return scaled


def _candidates(
    scores: NDArray[np.float64], top_k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ``top_k`` best tokens (all for 0), likeliest first, and their probabilities.

    Equal scores are ordered by token id, so that the draw does not depend on the sort.
    """
    tokens = np.arange(scores.size)
    if 0 < top_k < scores.size:
        threshold = np.partition(scores, -top_k)[-top_k]
        tokens = np.flatnonzero(scores >= threshold)
    order = np.argsort(-scores[tokens], kind="stable")
    tokens = tokens[order][: top_k or None]
    weights = np.exp(scores[tokens] - scores[tokens[0]])
    return tokens, weights / weights.sum()


def _kept(probabilities: NDArray[np.float64], top_p: float, min_p: float) -> int:
    """How many of the sorted candidates top-p and min-p leave; at least one."""
    by_sum = probabilities.size
    if top_p < 1:
        by_sum = int(np.searchsorted(np.cumsum(probabilities), top_p)) + 1
    by_ratio = int(np.count_nonzero(probabilities >= min_p * probabilities[0]))
    return max(1, min(by_sum, by_ratio, probabilities.size))
