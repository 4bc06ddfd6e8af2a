"""Guessed tokens change how a text is computed, never the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes.sampler import Sampler
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.stream import Stream
from edgelin.runtimes.writing import SEEN, Guesses, guess

PROMPT = "The quiet river runs past the old mill. The quiet river runs past the old"
# A penalty below 1 rewards: about half of what is guessed is right then.
AGAIN: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 0.5}


@pytest.fixture(scope="module")
def bundle(tiny: Any) -> Bundle:
    return edgelin.load(tiny.path, threads=1)


def _guess(seen: list[int], length: int) -> list[int]:
    """By looking at one place after the other, from the last."""
    for at in range(len(seen) - 4, -1, -1):
        if seen[at : at + 3] == seen[-3:]:
            followed = seen[at + 3 :]
            return [followed[i % len(followed)] for i in range(length)]
    return []


def test_a_guess_is_what_followed_the_last_time() -> None:
    random = np.random.default_rng(0)
    found = 0
    for count in (*range(8), 64, 65, 130):
        for _ in range(20):
            seen = random.integers(0, 3, count).tolist()
            wanted = _guess(seen, 7)
            assert guess(seen, 7) == wanted
            found += bool(wanted)
    assert found > 60
    assert guess([5, 5, 5, 5], 3) == [5, 5, 5]


def test_guesses_grow_when_right_and_become_rare_when_wrong() -> None:
    guesses, seen = Guesses(16), [1, 2, 3, 9, 1, 2, 3]
    lengths = []
    for _ in range(4):
        lengths.append(len(guesses.next(seen, 100)))
        guesses.judge(lengths[-1], lengths[-1])
    assert lengths == [4, 8, 16, 16]
    assert len(guesses.next(seen, 5)) == 5 and guesses.next(seen, 0) == []
    guesses.judge(16, 3)
    assert len(guesses.next(seen, 100)) == 3
    pauses = []
    for _ in range(7):
        guesses.judge(3, 0)
        pauses.append(0)
        while not guesses.next(seen, 100):
            pauses[-1] += 1
    assert pauses == [1, 3, 7, 15, 31, 32, 32]
    assert Guesses(0).next(seen, 100) == []


def _alike(found: Stream, wanted: Stream) -> None:
    """Both stand at the same place, up to rounding."""
    assert (found.position, found._recent, found._tail) == (
        wanted.position, wanted._recent, wanted._tail,
    )  # fmt: skip
    for name, array in wanted.states().items():
        np.testing.assert_allclose(found.states()[name], array, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {**AGAIN, "max_tokens": 130},
        {**AGAIN, "max_tokens": 65, "lookup": 1},
        {**AGAIN, "max_tokens": 64, "lookup": 100},
        {"max_tokens": 130, "temperature": 0.0, "repetition_penalty": 0.8},
        {"max_tokens": 63, "temperature": 0.0},
        {**AGAIN, "max_tokens": 1},
        {**AGAIN, "max_tokens": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "by turns"])
def test_the_text_is_that_of_single_steps(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], in_place: bool
) -> None:
    monkeypatch.setattr(bundle, "in_place", in_place)
    streams = bundle.stream(), bundle.stream()
    for _ in range(2):  # the second time from where the first ended
        lookup = {"lookup": 8, **settings}
        found = "".join(streams[0].generate(PROMPT, seed=5, **lookup))
        wanted = "".join(streams[1].generate(PROMPT, seed=5, **{**lookup, "lookup": 0}))
        assert found == wanted
        _alike(*streams)
        assert streams[0].flush() == streams[1].flush()


def test_a_guess_is_read_in_one_call(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, times = bundle.stream(), []
    feed = stream.feed
    monkeypatch.setattr(stream, "feed", lambda x, **k: times.append(len(x)) or feed(x, **k))
    list(stream.generate([5] * 3, temperature=0.0, repetition_penalty=1e-3, lookup=10**9))
    assert max(times[1:]) == bundle.manifest.chunk


def test_a_text_that_repeats_takes_fewer_calls(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for lookup in (0, 8):
        stream, times = bundle.stream(), []
        run = stream._buffers.run
        monkeypatch.setattr(
            stream._buffers, "run",
            lambda x, run=run, times=times, **k: times.append(x.shape[1]) or run(x, **k),
        )  # fmt: skip
        list(stream.generate(PROMPT, **AGAIN, max_tokens=100, lookup=lookup))
        calls.append(len(times))
        assert len(stream._seen) == stream.position <= SEEN
    assert calls[1] < 0.8 * calls[0]


def test_draws_within_a_guess_know_what_single_ones_know(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position, and the tokens before it: more than the sampler remembers."""
    original, known = Sampler.choose, []

    def choose(self: Sampler, logits: Any, recent: Any, position: int) -> int:
        known[-1][position] = list(recent)
        return original(self, logits, recent, position)

    monkeypatch.setattr(Sampler, "choose", choose)
    for lookup in (0, 8):
        known.append({})
        list(bundle.stream().generate(PROMPT, **AGAIN, max_tokens=100, lookup=lookup))
    assert known[0] == known[1]


def _copying(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, ids: list[int], **settings: Any
) -> tuple[str, Stream]:
    """What a stream writes whose draws are what it has read, from the beginning."""
    stream = bundle.stream()

    def choose(self: Sampler, logits: Any, recent: Any, position: int) -> int:
        return ids[position - len(ids)]

    monkeypatch.setattr(Sampler, "choose", choose)
    text = "".join(stream.generate(ids, max_tokens=len(ids), temperature=0.0, **settings))
    return text, stream


@pytest.mark.parametrize("stop", ["runs past", "mill", " old mill. T", "e"])
def test_a_stop_string_within_a_guess_ends_the_text_there(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    ids = bundle.text.encode("The quiet river runs past the old mill. The quiet river")
    found = [_copying(bundle, monkeypatch, ids, stop=stop, lookup=n) for n in (8, 0)]
    assert found[0][0] == found[1][0] and stop not in found[0][0]
    _alike(found[0][1], found[1][1])


def test_an_end_token_within_a_guess_is_not_read(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bundle.manifest.tokenizer is not None
    end = min(bundle.manifest.tokenizer.ends)
    ids = [*bundle.text.encode("The quiet river"), end, *bundle.text.encode("runs past")]
    found = [_copying(bundle, monkeypatch, ids * 2, lookup=n) for n in (8, 0)]
    assert found[0][0] == found[1][0] == "The quiet river"
    _alike(found[0][1], found[1][1])


@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("where", ["feed", "choose"])
def test_an_interrupted_guess_leaves_the_stream_where_it_stood(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, where: str, call: int
) -> None:
    """In calls that read a guess, in those that read what is kept of it, and between them."""
    stream, twin = bundle.stream(), bundle.stream()
    feed, choose, seen = stream.feed, Sampler.choose, iter(range(1000))

    def broken_feed(tokens: Any, **options: Any) -> Any:
        if where == "feed" and 1 < len(tokens) < 20 and next(seen) == call:
            raise KeyboardInterrupt
        return feed(tokens, **options)

    def broken_choose(self: Sampler, logits: Any, recent: Any, position: int) -> int:
        if where == "choose" and stream.position > position and next(seen) == call:
            raise KeyboardInterrupt
        return choose(self, logits, recent, position)

    text = ""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stream, "feed", broken_feed)
        patch.setattr(Sampler, "choose", broken_choose)
        for piece in stream.generate(PROMPT, **AGAIN, lookup=8):
            text += piece
    wanted, other = twin.generate(PROMPT, **AGAIN), ""
    while twin.position < stream.position:
        other += next(wanted)
    assert text == other
    _alike(stream, twin)


def test_streams_with_snapshots_guess_nothing(bundle: Bundle) -> None:
    stream, twin = bundle.stream(), bundle.stream()
    for each in (stream, twin):
        each.checkpoint(every=16)
    text = "".join(stream.generate(PROMPT, **AGAIN, max_tokens=60, lookup=8))
    assert text == "".join(twin.generate(PROMPT, **AGAIN, max_tokens=60))
    place = stream.position - 21
    stream.rewind(place), twin.rewind(place)
    assert stream.states()["recurrent.0"].tobytes() == twin.states()["recurrent.0"].tobytes()


def test_what_cannot_be_guessed_is_refused(bundle: Bundle) -> None:
    for lookup, temperature in ((-1, 0.0), (1.5, 0.0), (8, 0.5)):
        with pytest.raises(EdgelinError, match=f"lookup is {lookup}; allowed: "):
            bundle.stream().generate("a", lookup=lookup, temperature=temperature)


def test_a_stream_that_is_set_back_ends_its_text_with_an_error(bundle: Bundle) -> None:
    stream = bundle.stream()
    stream.checkpoint(every=4)
    for back in (stream.reset, lambda: stream.rewind(0)):
        pieces = stream.generate("The old", max_tokens=5, seed=1)
        next(pieces)
        back()
        with pytest.raises(EdgelinError, match="set back to where nothing is read"):
            next(pieces)
