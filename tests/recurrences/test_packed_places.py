"""Where packed sequences have their segments: each token in one, and about as even as a batch."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from edgelin.recurrences.linear.kernel_places import Places


def places(lengths: list[int]) -> tuple[Places, bool]:
    """Of sequences of these lengths, with 16 heads."""
    from edgelin.recurrences.linear.kernel_plan import places_of

    return places_of(tuple(accumulate(lengths, initial=0)), 16, True, torch.device("cpu"))


@pytest.mark.parametrize("lengths", [[1], [0, 0, 5], [64] * 9, [3000, 0, 65, 20000, 1, 1100, 512]])
def test_every_chunk_is_in_one_segment(lengths: list[int]) -> None:
    made, single = places(lengths)
    begins = [0, *accumulate(lengths)]
    chunks: list[tuple[int, int, int]] = []
    for number, begin, tokens, first, count, before, slot, total in made.segments.lines.tolist():
        assert (begin, tokens, total) == (begins[number], lengths[number], sum(lengths))
        assert before == sum(-(-n // 64) for n in lengths[:number])
        chunks += [(before + first + i, begin + 64 * (first + i), slot) for i in range(count)]
    spans = [(i, token, slot) for i, (token, _, slot) in enumerate(made.spans.lines.tolist())]
    assert sorted(chunks) == spans and len(spans) == sum(-(-n // 64) for n in lengths)
    left = [left for _, left, _ in made.spans.lines.tolist()]
    assert left == [n - i for n in lengths for i in range(0, n, 64)]
    assert single == all(n < 2 for _, n in made.sequences.lines.tolist())


@pytest.mark.parametrize("lengths", [[70, 3000], [8000, 0, 9000, 64], [20000]])
def test_several_segments(lengths: list[int]) -> None:
    """Slots of a sequence follow one another, one for each segment."""
    made, single = places(lengths)
    lines, counts = made.segments.lines.tolist(), made.sequences.lines.tolist()
    assert not single
    assert [line[4] for line in lines] == sorted((line[4] for line in lines), reverse=True)
    for number, (slot, pieces) in enumerate(counts):
        mine = sorted((line for line in lines if line[0] == number), key=lambda line: line[3])
        assert [line[6] for line in mine] == list(range(slot, slot + pieces))
        behind, before = ([x for x in y.lines.tolist() if x[0] == number] for y in made.adding)
        assert sorted(behind) == sorted(mine[:-1]) and sorted(before) == sorted(mine[1:])
    assert [slot for slot, _ in counts] == [
        0, *accumulate(pieces for _, pieces in counts[:-1])
    ]  # fmt: skip
    assert made.parts == (sum(pieces for _, pieces in counts), 16)
    tables = (made.segments, *made.adding, made.sequences, made.spans)
    assert all(table.programs == 16 * len(table.lines) for table in tables)
    assert all(table.lines.data_ptr() % 16 == 0 for table in tables)


@pytest.mark.parametrize("batch, time", [(8, 4096), (1, 32768), (64, 512), (2, 2048)])
def test_sequences_of_one_length_are_cut_as_a_batch_is(batch: int, time: int) -> None:
    from edgelin.recurrences.linear.kernel_plan import Plan, Shape

    plan = Plan(Shape(batch, time, 16, 128, 128, 16, 1, True, False, 1.0))
    lines = places([time] * batch)[0].segments.lines
    assert len(lines) == batch * plan.segments and (lines[:, 4] == plan.chunks).all()


def test_short_sequences_stay_whole() -> None:
    made, single = places([100, 511, 1000, 0] * 50)
    assert single and made.parts == (200, 16)


def test_one_long_sequence_is_cut() -> None:
    """Else everything waits for it."""
    made, _ = places([30000, *[64] * 40])
    assert int(made.segments.lines[:, 4].max()) <= 2 * 32768 / 16 / 64
