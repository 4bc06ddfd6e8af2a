"""Random split points: one sequence in pieces and single steps is the float64 loop over all of it.

Hypothesis chooses the pieces, the rows, where they stand in their streams and the precision. CI
tries a few of them with every mixer, the same ones each time; ``make test-full`` many new ones.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import pytest
import test_ssm
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from loops import CASES
from loops.common import HIDDEN
from test_mixers import as_float32, build, check, filled_state, in_pieces, numbers, truth

# Not shrunk: what all mixers share would be shrunk for each of them.
TRIED = settings(max_examples=settings().max_examples // 3, phases=[Phase.generate])
LIMITS = {torch.float64: 1e-9, torch.float32: 5e-5}  # of max|x - y| / max|y|


class Split(NamedTuple):
    """How a sequence is read."""

    pieces: list[int]
    positions: list[int]
    dtype: torch.dtype
    seed: int


STEPS = st.lists(st.just(1), min_size=1, max_size=5)
CHUNKS = st.lists(st.sampled_from([2, 3, 63, 64, 65]) | st.integers(1, 80), min_size=1, max_size=2)
# Before a ring of a window is full; where a block of compensated sums ends; deep in a stream.
POSITIONS = st.integers(0, 130) | st.integers(4000, 4096) | st.integers(0, 2_000_000)
SPLITS = st.builds(
    Split,
    st.lists(STEPS | CHUNKS, min_size=2, max_size=4).map(lambda parts: [*chain(*parts)]),
    st.sampled_from([1, 3]).flatmap(lambda n: st.lists(POSITIONS, min_size=n, max_size=n)),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 10**6),
)


@pytest.mark.parametrize("case", CASES)
@TRIED
@given(split=SPLITS)
def test_any_pieces_are_the_loop(case: str, split: Split) -> None:
    mixer, rows = build(case), len(split.positions)
    x = numbers(rows, sum(split.pieces), HIDDEN, seed=split.seed)
    state, position = filled_state(mixer, rows), torch.tensor(split.positions)
    expected = truth(case, x, state, position)
    if split.dtype == torch.float64:
        got = in_pieces(mixer.double(), x, state, position, split.pieces)
    else:
        got = in_pieces(mixer, x.float(), as_float32(state), position, split.pieces)
    check(got, expected, LIMITS[split.dtype])


@pytest.mark.parametrize("kind", test_ssm.KINDS)
@TRIED
@given(split=SPLITS)
def test_any_pieces_are_the_loop_of_a_diagonal_system(kind: str, split: Split) -> None:
    mixer, rows = test_ssm.build(kind), len(split.positions)
    x = numbers(rows, sum(split.pieces), test_ssm.HIDDEN, seed=split.seed)
    state = test_ssm.filled_state(mixer, rows)
    y, h = test_ssm.loop(mixer, x.numpy(), state)
    parts = {"ssm_re.2": h.real, "ssm_im.2": h.imag}
    names = [spec.name for spec in mixer.state_specs()]
    expected = y, {n: parts.get(n, np.real(h)) for n in names}
    position, dtype = torch.tensor(split.positions), split.dtype
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    got = in_pieces(mixer.to(dtype), x.to(dtype), state, position, split.pieces)
    check(got, expected, LIMITS[dtype])
