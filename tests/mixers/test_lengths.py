"""Rows of different lengths in one call: each equals its float64 loop alone, for every mixer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loops import CASES
from loops.common import HIDDEN
from test_mixers import as_float32, build, filled_state, numbers, shared, truth
from torch import Tensor

from edgelin.errors import EdgelinError

GROWING = {
    case
    for case, table in CASES.items()
    if 0 in (table.get("window"), table.get("attention", {}).get("window"))
}
FIXED = [case for case in CASES if case not in GROWING]
POSITIONS = torch.tensor([3, 0, 1_000_000, 70])


def _call(mixer: torch.nn.Module, x: Tensor, state: dict[str, Tensor], lengths: Tensor) -> tuple:
    return mixer(x, state, POSITIONS, *shared(mixer, x), lengths=lengths)


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.parametrize(
    "time, lengths", [(1, [0, 1, 1, 0]), (65, [0, 1, 64, 65]), (130, [5, 0, 66, 130])]
)
def test_every_row_is_its_own_loop(case: str, time: int, lengths: list[int]) -> None:
    mixer = build(case)
    x, state = numbers(4, time, HIDDEN, seed=2), filled_state(mixer, 4)
    single = _call(mixer, x.float(), as_float32(state), torch.tensor(lengths))
    double = _call(mixer.double(), x, state, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        at = slice(row, row + 1)
        own = {name: tensor[at] for name, tensor in state.items()}
        if length == 0:
            for name, tensor in own.items():
                assert torch.equal(single[1][name][at], tensor.float())
                assert torch.equal(double[1][name][at], tensor)
            continue
        expected = truth(case, x[at, :length], own, POSITIONS[at])
        for found, tolerance in ((single, 2e-5), (double, 1e-9)):
            got = {"y": found[0][at, :length], **{n: t[at] for n, t in found[1].items()}}
            for name, array in {"y": expected[0], **expected[1]}.items():
                error = np.abs(got[name].detach().numpy() - array).max()
                assert error <= tolerance * np.abs(array).max(), (name, row)


@pytest.mark.parametrize("case", FIXED)
def test_what_stands_behind_an_end_changes_no_bit(case: str) -> None:
    mixer = build(case)
    state, lengths = as_float32(filled_state(mixer, 4)), torch.tensor([0, 1, 40, 70])
    x = numbers(4, 70, HIDDEN, seed=2).float()
    other = x.clone()
    for row, length in enumerate(lengths):
        other[row, length:] = 30 * numbers(70 - int(length), HIDDEN, seed=5 + row).float()
    (y, after), (y_other, after_other) = (_call(mixer, a, state, lengths) for a in (x, other))
    for row, length in enumerate(lengths):
        assert torch.equal(y[row, :length], y_other[row, :length])
    for name, tensor in after.items():
        assert torch.equal(tensor, after_other[name]), name


@pytest.mark.parametrize("case", sorted(GROWING))
def test_a_state_that_grows_has_one_length(case: str) -> None:
    mixer = build(case)
    with pytest.raises(EdgelinError, match=r"need states of fixed size.*; give it a window"):
        _call(mixer, numbers(4, 2, HIDDEN).float(), as_float32(filled_state(mixer, 4)), POSITIONS)
