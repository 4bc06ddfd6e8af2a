"""Going back by a snapshot and replay gives what was there, bit for bit, and says what it cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.stream import Stream

SAMPLING: dict[str, Any] = {
    "seed": 4, "repetition_penalty": 1.3, "top_k": 0, "temperature": 2.0, "stop": ("qXq",),
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tiny: Any) -> Bundle:
    return edgelin.load(tiny.path, threads=1)


def _content(stream: Stream) -> tuple[Any, ...]:
    """Everything that decides how a stream goes on."""
    states = {name: array.tobytes() for name, array in stream.states().items()}
    outputs = None if stream.outputs is None else stream.outputs.tobytes()
    tail = (stream._tail.pending, stream._tail.held)
    return stream.position, states, outputs, [*stream._recent], tail


def _reading(bundle: Bundle, seed: int, batch: int = 1) -> tuple[Stream, dict[int, Any]]:
    """A stream with checkpoints that has read calls of many sizes, and how it stood after each."""
    random = np.random.default_rng(seed)
    stream = bundle.stream(batch)
    stream.checkpoint(every=20, keep=100)
    seen = {0: _content(stream)}
    for time in [1, 7, 8, 9, 1, 1, 63, 64, 65, 1, 130, 2]:
        stream.feed(random.integers(1, 300, (batch, time)))
        seen[stream.position] = _content(stream)
    return stream, seen


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_every_position_between_calls_comes_back_exactly(
    bundle: Bundle, batch: int, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "in_place", in_place)
    stream, seen = _reading(bundle, 0, batch)
    assert stream.history is not None
    for position in sorted(seen, reverse=True):
        cost = stream.rewind(position)
        assert _content(stream) == seen[position]
        near = max(p for p in stream.history.positions if p <= position)
        assert (cost.position, cost.snapshot) == (position, near if cost.replayed else position)
        assert cost.replayed == position - cost.snapshot <= 28  # every 20, between chunks of 8


def test_positions_within_a_call_come_back_up_to_rounding(tiny: Any, bundle: Bundle) -> None:
    ids = [int(i) for i in np.random.default_rng(1).integers(1, 300, 150)]
    logits, _ = tiny.reference(ids)
    stream = bundle.stream()
    stream.checkpoint(every=16)
    stream.feed(ids)
    for position in (149, 131, 130, 65, 64, 63, 33, 1):
        stream.rewind(position)
        assert stream.position == position and stream.logits is not None
        scale = np.abs(logits).max()
        np.testing.assert_allclose(stream.logits[0], logits[position - 1], atol=2e-6 * scale)
        assert [*stream._recent] == ids[:position][-64:]
        np.testing.assert_allclose(stream.fork().feed(ids[position:]), logits[-1], atol=1e-4)


def test_text_comes_back_to_the_character(bundle: Bundle) -> None:
    """Also in the middle of a character, of a stop string, and of a penalty window."""
    stream = bundle.stream()
    stream.checkpoint(every=7, keep=100)
    pieces, seen = list[str](), dict[int, Any]()
    for piece in stream.generate("Köln", max_tokens=60, **SAMPLING):
        pieces.append(piece)
        seen[stream.position] = (_content(stream), len(pieces))
    assert any(content[4] != (b"", "") for content, _ in seen.values())
    for position in sorted(seen, reverse=True):
        stream.rewind(position)
        assert _content(stream) == seen[position][0]
        written = seen[position][1]
        again = [*stream.generate(max_tokens=60 - written, **SAMPLING)]
        assert again == pieces[written:]
        stream.rewind(position)


def test_a_new_prompt_does_not_take_the_tail_away(bundle: Bundle) -> None:
    stream = bundle.stream()
    stream.checkpoint(every=100)
    stream.feed([1, 2])
    stream._tail.held, stream._tail.pending = "EN", b"\xc3"
    at = _content(stream)
    list(stream.generate("The", max_tokens=2, seed=1))
    stream.rewind(2)
    assert _content(stream) == at


def test_what_was_rewound_is_forgotten(bundle: Bundle) -> None:
    stream, _ = _reading(bundle, 2)
    assert stream.history is not None
    stream.rewind(100)
    assert stream.history.positions[-1] <= 100
    stream.feed([5, 6, 7])
    at = _content(stream)
    stream.feed(list(range(1, 50)))
    assert stream.rewind(103).replayed <= 28
    assert _content(stream) == at


def test_memory_is_bounded_and_told(bundle: Bundle) -> None:
    stream = bundle.stream()
    stream.checkpoint(every=10, keep=3)
    assert stream.history is not None
    one = stream.history.nbytes
    sizes = []
    for _ in range(500):
        stream.feed([1])
        sizes.append(stream.history.nbytes)
    assert stream.history.positions == [470, 480, 490]
    snapshot = stream.state_bytes + 300 * 4  # states and logits
    assert one == stream.state_bytes and max(sizes[100:]) == 3 * snapshot + 30 * 8
    with pytest.raises(EdgelinError, match=r"position is 469; allowed: 470 .. 500 \(from the old"):
        stream.rewind(469)
    assert stream.position == 500


def test_forks_share_the_way_back_and_go_their_own(bundle: Bundle) -> None:
    stream, seen = _reading(bundle, 3)
    twin = stream.fork()
    at = _content(stream)
    assert twin.history is not None and stream.history is not None
    assert twin.history.positions == stream.history.positions
    twin.feed([7])  # is no part of the other's past
    stream.feed([8])
    after = _content(stream)
    stream.feed([9])
    stream.rewind(at[0] + 1)
    assert _content(stream) == after
    stream.rewind(at[0])
    for position in sorted(seen, reverse=True)[:4]:
        twin.rewind(position)
        twin.feed([9])
    assert _content(stream) == at
    stream.rewind(90)
    assert _content(stream) == seen[90]


def test_a_fork_has_all_that_the_sampler_and_the_text_need(bundle: Bundle) -> None:
    stream = bundle.stream()
    whole = [*bundle.stream().generate("Köln", max_tokens=40, **SAMPLING)]
    for count, piece in enumerate(stream.generate("Köln", max_tokens=40, **SAMPLING)):
        assert piece == whole[count]
        assert [*stream.fork().generate(max_tokens=39 - count, **SAMPLING)] == whole[count + 1 :]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("time", [1, 5, 30])
def test_a_failed_call_can_be_rewound(
    bundle: Bundle, in_place: bool, time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "in_place", in_place)
    stream, seen = _reading(bundle, 4)
    last = stream.position
    run = stream._buffers.run
    calls: list[int] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        result = run(*args, **kwargs)
        if len(calls) == 1 + (time > 8):
            raise KeyboardInterrupt  # when the states are new and nothing else is
        return result

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stream._buffers, "run", failing)
        stream.feed(list(range(1, time + 1)))
    if time == 1:
        with pytest.raises(EdgelinError, match="its state is lost; rewind, reset the stream or"):
            stream.feed([1])
    stream.rewind(last)
    assert _content(stream) == seen[last]
    stream.rewind(90)
    assert _content(stream) == seen[90]


def test_an_interrupted_replay_stands_where_it_got(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = bundle.stream()
    stream.checkpoint(every=100)
    seen = {}
    for token in range(1, 40):
        stream.feed([token])
        seen[token] = _content(stream)
    run, calls = stream._buffers.run, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 20:
            raise RuntimeError("out of memory")
        return run(*args, **kwargs)

    monkeypatch.setattr(bundle, "in_place", False)
    with monkeypatch.context() as patch, pytest.raises(EdgelinError, match="out of memory"):
        patch.setattr(stream._buffers, "run", failing)
        stream.rewind(30)
    assert stream.position == 19
    stream.rewind(19)
    assert _content(stream) == seen[19]
    stream.rewind(7)
    assert _content(stream) == seen[7]


def test_reset_and_load_begin_another_way(bundle: Bundle, tmp_path: Any) -> None:
    stream, _ = _reading(bundle, 5)
    stream.save(tmp_path / "s.state")
    stream.reset()
    assert stream.history is not None and stream.history.positions == [0]
    stream.feed([1, 2])
    stream.load(tmp_path / "s.state")
    assert stream.history.positions == [stream.position]
    with pytest.raises(EdgelinError, match="position is 3; allowed: "):
        stream.rewind(3)


def test_features_are_read_again_too(sensor: Any) -> None:
    stream = edgelin.load(sensor.path, threads=1).stream()
    stream.checkpoint(every=100)
    steps = np.random.default_rng(0).standard_normal((30, 5)).astype(np.float32)
    given = steps[:13].copy()
    stream.feed(given)
    given[...] = 9  # what was read is not the caller's array
    at = _content(stream)
    stream.feed(steps[13:])
    end = _content(stream)
    assert stream.rewind(13).replayed == 13
    assert _content(stream) == at
    stream.feed(steps[13:])
    assert _content(stream) == end


def test_refusals(bundle: Bundle) -> None:
    stream = bundle.stream()
    stream.feed([1])
    with pytest.raises(EdgelinError, match=r"no snapshots; call checkpoint\(every=n\) first"):
        stream.rewind(0)
    for every, keep in ((0, 1), (1, 0), (2.5, 1), (True, 1), ("8", 1)):
        with pytest.raises(EdgelinError, match="1 or more"):
            stream.checkpoint(every=every, keep=keep)  # type: ignore[arg-type]
    stream.checkpoint(every=4)
    stream.feed([1, 2])
    for position in (0, 4, -1, 2.0, None):
        with pytest.raises(EdgelinError, match=r"allowed: .*1 \.\. 3"):
            stream.rewind(position)  # type: ignore[arg-type]
    assert stream.position == 3
