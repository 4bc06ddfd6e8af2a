"""Streams of a pool equal a float64 loop each, whoever else comes, goes or reads beside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes import state_file
from edgelin.runtimes.pool import LostError, Pool
from edgelin.runtimes.session import Bundle
from edgelin.state import StateSpec


@pytest.fixture(scope="module")
def bundle(tiny: Any) -> Bundle:
    return edgelin.load(tiny.path, threads=1)


@pytest.fixture(params=[True, False], ids=["in place", "by turns"])
def pool(bundle: Bundle, request: pytest.FixtureRequest, monkeypatch: Any) -> Iterator[Pool]:
    monkeypatch.setattr(bundle, "in_place", request.param)
    return bundle.pool(5)


def _ids(tiny: Any, count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, tiny.vocab_size, count)]


def _check(tiny: Any, pool: Pool, slot: int, read: list[int]) -> None:
    """Everything of a stream is what reading ``read`` alone leaves."""
    logits, state = tiny.reference(read)
    outputs = pool.outputs(slot)
    assert outputs is not None
    np.testing.assert_allclose(outputs, logits[-1], atol=2e-6 * np.abs(logits).max())
    saved = pool.snapshot(slot)
    found = saved.tensors["recurrent.0"][0]
    np.testing.assert_allclose(found, state, atol=2e-6 * np.abs(state).max())
    assert saved.position == pool.position(slot) == len(read)
    assert saved.tensors["position"].tolist() == [len(read)]
    assert pool.recent(slot) == read[-64:]


def test_random_traffic_equals_each_stream_alone(tiny: Any, pool: Pool) -> None:
    """Streams come, go, restart and read ragged stretches around the chunk of 8, in any company."""
    random = np.random.default_rng(7)
    read: dict[int, list[int]] = {}
    for _ in range(150):
        action = random.integers(10)
        if action < 2 and pool.free:
            read[pool.add()] = []
        elif action == 2 and read:
            slot = int(random.choice(list(read)))
            pool.remove(slot)
            del read[slot]
        elif action == 3 and read:
            slot = int(random.choice(list(read)))
            pool.reset(slot)
            read[slot] = []
        elif read:
            some = random.permutation(list(read))[: random.integers(1, len(read) + 1)]
            given = {
                int(s): _ids(
                    tiny, int(random.choice([1, 1, 1, 2, 7, 8, 9, 20])), int(random.integers(99))
                )
                for s in some
            }
            assert list(pool.feed(given)) == list(given)
            for slot, ids in given.items():
                read[slot] += ids
        assert pool.slots == sorted(read) and len(pool) == 5 - pool.free == len(read)
        for slot, ids in read.items():
            if ids:
                _check(tiny, pool, slot, ids)
            else:
                assert pool.outputs(slot) is None and pool.position(slot) == 0


def test_a_stream_that_does_not_read_is_kept_bit_for_bit(tiny: Any, pool: Pool) -> None:
    slots = [pool.add() for _ in range(5)]
    pool.feed({slot: _ids(tiny, 5 + slot, slot) for slot in slots})
    quiet = slots[1]
    before = pool.snapshot(quiet)
    for i in range(20):
        others = [s for s in slots if s != quiet]
        pool.feed({slot: _ids(tiny, 1 + (slot + i) % 11, i) for slot in others[i % 3 :]})
        after = pool.snapshot(quiet)
        for name, tensor in before.tensors.items():
            assert tensor.tobytes() == after.tensors[name].tobytes()


def test_nothing_of_a_stream_is_left_for_the_next(tiny: Any, pool: Pool) -> None:
    """Content is compared: the same text gives the same bits in a new pool and in a used one."""
    fresh = pool.add()
    expected = pool.feed({fresh: [1, 2, 3]})[fresh].tobytes()
    pool.feed({fresh: _ids(tiny, 40)})
    pool.remove(fresh)
    again = pool.add()
    assert again != fresh
    assert pool.outputs(again) is None and pool.recent(again) == []
    assert pool.feed({again: [1, 2, 3]})[again].tobytes() == expected
    pool.reset(again)
    assert pool.feed({again: [1, 2, 3]})[again].tobytes() == expected


def test_steady_steps_move_no_row(tiny: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [pool.add() for _ in range(4)]
    pool.feed({slots[2]: _ids(tiny, 20), **{s: [1] for s in slots if s != slots[2]}})
    monkeypatch.setattr(pool._buffers, "swap", lambda *rows: pytest.fail("rows were exchanged"))
    for _ in range(3):
        pool.feed({slot: [2] for slot in reversed(slots)})
        pool.feed({slots[3]: [3, 4]})  # alone, wherever it stands


def test_calls_are_as_few_as_there_are_lengths(
    tiny: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    run = pool._buffers.run
    monkeypatch.setattr(pool._buffers, "run", lambda x, **k: calls.append(x.shape) or run(x, **k))
    one, two, three = (pool.add() for _ in range(3))
    pool.feed({one: [1], two: _ids(tiny, 12), three: [5]})
    assert calls == [(3, 1), (1, 8), (1, 3)]


def test_snapshots_go_to_streams_and_files_and_back(
    tiny: Any, bundle: Bundle, pool: Pool, tmp_path: Path
) -> None:
    ids, more = _ids(tiny, 70), [4, 5, 6]
    slot, other = pool.add(), pool.add()
    pool.feed({slot: ids, other: ids[:3]})
    saved = pool.snapshot(slot)
    state_file.write(tmp_path / "s.state", saved)
    stream = bundle.stream()
    stream.load(tmp_path / "s.state")
    expected = stream.feed(more)
    np.testing.assert_array_equal(pool.feed({slot: more})[slot], expected)
    stream.save(tmp_path / "later.state")
    for source in (saved, tmp_path / "s.state"):
        pool.restore(other, source)
        assert pool.position(other) == 70 and pool.recent(other) == ids[-64:]
        np.testing.assert_array_equal(pool.feed({other: more})[other], expected)
    pool.restore(slot, tmp_path / "later.state")
    _check(tiny, pool, slot, [*ids, *more])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_stream_at_rest_goes_on_as_its_file_does(
    tiny: Any, bundle: Bundle, pool: Pool, tmp_path: Path, dtype: str
) -> None:
    ids = _ids(tiny, 70)
    slots = [pool.add() for _ in range(5)]
    pool.feed({slots[1]: ids, slots[2]: [7]})
    kept, stream = pool.snapshot(slots[2]), bundle.stream()
    state_file.write(tmp_path / "s.state", pool.snapshot(slots[1]), dtype=dtype)
    stream.load(tmp_path / "s.state")
    resting = pool.rest(slots[1], dtype=dtype)
    assert resting.position == 70 and slots[1] not in pool.slots and pool.free == 1
    whole = sum(array.nbytes for array in kept.tensors.values())
    assert resting.nbytes == whole if dtype == "float32" else resting.nbytes < whole
    for _ in range(2):
        slot = pool.wake(resting)
        assert pool.position(slot) == 70 and pool.recent(slot) == ids[-64:]
        np.testing.assert_array_equal(pool.feed({slot: [4]})[slot], stream.fork().feed([4]))
        pool.remove(slot)
    pool.wake(resting)
    with pytest.raises(EdgelinError, match="all 5 slots of the pool are taken"):
        pool.wake(resting)
    for name, array in pool.snapshot(slots[2]).tensors.items():
        np.testing.assert_array_equal(array, kept.tensors[name])


def test_what_cannot_rest_stays(pool: Pool) -> None:
    slot = pool.add()
    with pytest.raises(EdgelinError, match="has read nothing yet"):
        pool.rest(slot)
    pool.feed({slot: [1]})
    with pytest.raises(EdgelinError, match="allowed: float32, float16, int8"):
        pool.rest(slot, dtype="int4")
    other = pool.rest(slot)
    other.saved.model_hash = "0" * 64
    with pytest.raises(EdgelinError, match="another model"):
        pool.wake(other)
    assert len(pool) == 0


def test_features_and_one_slot(sensor: Any) -> None:
    pool = edgelin.load(sensor.path, threads=1).pool(1)
    rows = np.random.default_rng(0).standard_normal((11, 5)).astype(np.float32)
    slot = pool.add()
    found = pool.feed({slot: rows})[slot]
    np.testing.assert_allclose(found, sensor.reference(rows)[0][-1], rtol=1e-4, atol=1e-5)
    assert pool.recent(slot) == [] and pool.snapshot(slot).text is None
    assert pool.feed({}) == {}


def test_what_is_wrong_is_refused_and_nothing_is_read(tiny: Any, pool: Pool) -> None:
    slots = [pool.add() for _ in range(5)]
    pool.feed({slot: [slot + 1] for slot in slots})
    with pytest.raises(EdgelinError, match="all 5 slots of the pool are taken"):
        pool.add()
    gone = slots.pop()
    pool.remove(gone)
    for wrong, message in [
        ({slots[0]: [1], gone: [1]}, f"the pool has no slot {gone}; it has: 0, 1, 2, 3; add one"),
        ({slots[0]: [1], slots[1]: [-1]}, "slot 1: token id -1 is out of range"),
        ({slots[0]: [1], slots[1]: []}, "slot 1: token ids have shape"),
        ({slots[0]: [1], "x": [1]}, "the pool has no slot 'x'"),
    ]:
        with pytest.raises(EdgelinError, match=message) as caught:
            pool.feed(wrong)
        assert "\n" not in str(caught.value) and not isinstance(caught.value, LostError)
    for call in (pool.remove, pool.reset, pool.snapshot, pool.position):
        with pytest.raises(EdgelinError, match="the pool has no slot"):
            call(gone)
    new = pool.add()
    with pytest.raises(EdgelinError, match="has read nothing yet"):
        pool.snapshot(new)
    for slot in slots:
        _check(tiny, pool, slot, [slot + 1])


def test_a_stream_whose_answer_is_not_finite_is_lost_alone(tiny: Any, pool: Pool) -> None:
    slots = [pool.add() for _ in range(3)]
    pool.feed({slot: [1, 2] for slot in slots})
    good = pool.snapshot(slots[1])
    bad = pool.snapshot(slots[1])
    bad.tensors["recurrent.0"][...] = np.finfo(np.float32).max
    pool.restore(slots[1], bad)
    with pytest.raises(LostError, match=r"not finite.*state of slot 1 is lost: reset") as caught:
        pool.feed({slot: [3] for slot in slots})
    assert caught.value.slots == (1,) and list(caught.value.outputs) == [0, 2]
    for slot in (0, 2):
        _check(tiny, pool, slot, [1, 2, 3])
    for call in (pool.snapshot, lambda slot: pool.feed({slot: [1]})):
        with pytest.raises(EdgelinError, match="state of slot 1 is lost by a call that failed"):
            call(slots[1])
    pool.restore(slots[1], good)
    pool.feed({slots[1]: [9]})
    _check(tiny, pool, slots[1], [1, 2, 9])


@pytest.mark.parametrize("error", [RuntimeError("out of\nmemory"), KeyboardInterrupt()])
def test_a_call_that_fails_half_way_loses_what_it_had_not_read(
    tiny: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    slots = [pool.add() for _ in range(3)]
    run, calls = pool._buffers.run, []

    def failing(inputs: Any, **options: Any) -> Any:
        calls.append(inputs.shape)
        if len(calls) == 2:
            raise error
        return run(inputs, **options)

    monkeypatch.setattr(pool._buffers, "run", failing)
    with pytest.raises(LostError if isinstance(error, Exception) else KeyboardInterrupt):
        pool.feed({slots[0]: [1, 2, 3], slots[1]: [4]})
    monkeypatch.undo()
    _check(tiny, pool, slots[1], [4])
    with pytest.raises(EdgelinError, match="slot 0 is lost"):
        pool.feed({slots[0]: [1]})
    pool.reset(slots[0])
    pool.feed({slots[0]: [1], slots[2]: [8]})
    _check(tiny, pool, slots[0], [1])
    _check(tiny, pool, slots[2], [8])


def test_states_that_grow_and_sizes_that_make_no_sense_are_refused(bundle: Bundle) -> None:
    for size in (0, -1, 1.5, True):
        with pytest.raises(EdgelinError, match="slots is"):
            bundle.pool(size)  # type: ignore[arg-type]
    for size in (10**14, 10**30):
        for ask in (bundle.pool, lambda n: bundle.stream(batch=n)):
            with pytest.raises(EdgelinError, match=rf"states of {size} streams take .* GB"):
                ask(size)
    grown = StateSpec("key", 1, (2, "past", 4), "batch heads token channels")
    bundle.manifest.states.append(grown)
    try:
        with pytest.raises(EdgelinError, match=r"key\.1 of .* grows with every token; export"):
            bundle.pool(2)
    finally:
        bundle.manifest.states.remove(grown)


def test_threads_take_turns(tiny: Any, pool: Pool) -> None:
    read: dict[int, list[int]] = {}
    last = threading.Lock()  # of the fifth slot, beside one for each thread

    def talk(seed: int) -> None:
        slot = pool.add()
        read[slot] = _ids(tiny, 30, seed)
        for start in range(0, 30, 3):
            pool.feed({slot: read[slot][start : start + 3]})
        with last:
            pool.remove(pool.add())

    threads = [threading.Thread(target=talk, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read) == pool.slots
    for slot, ids in read.items():
        _check(tiny, pool, slot, ids)
