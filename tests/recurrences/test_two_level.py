"""Sums on two levels: the same numbers for any calls, and no increment lost on a long stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from edgelin.recurrences.linear import linear
from edgelin.recurrences.linear.two_level import two_level

HEADS, KEY, VALUE = 2, 3, 5
BLOCK = 4096


def inputs(batch: int, time: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, positive keys and values in float64."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(width: int) -> Tensor:
        return torch.rand(batch, time, HEADS, width, generator=generator, dtype=torch.float64)

    return numbers(KEY), numbers(KEY), numbers(VALUE)


def loop(q: Tensor, k: Tensor, v: Tensor, old: Tensor, new: Tensor, start: list[int]) -> Any:
    """Token by token in float64 numpy, each row with its own position."""
    qs, ks, vs, old_, new_ = (x.double().numpy().copy() for x in (q, k, v, old, new))
    out = np.zeros((*qs.shape[:3], VALUE))
    for row, position in enumerate(start):
        for t in range(qs.shape[1]):
            new_[row] += np.einsum("hk,hv->hkv", ks[row, t], vs[row, t])
            out[row, t] = 2.0 * np.einsum("hk,hkv->hv", qs[row, t], old_[row] + new_[row])
            if (position + t + 1) % BLOCK == 0:
                old_[row], new_[row] = old_[row] + new_[row], 0.0
    return out, old_, new_


def sums(batch: int) -> tuple[Tensor, Tensor]:
    """Two states that are not zero."""
    generator = torch.Generator().manual_seed(5)
    old, new = torch.rand(2, batch, HEADS, KEY, VALUE, generator=generator, dtype=torch.float64)
    return 100 * old, new


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("cuts", [[130], [1] * 130, [5, 64, 1, 60], [65, 65]], ids=str)
def test_any_calls_are_the_loop(cuts: list[int], dtype: torch.dtype, tolerance: float) -> None:
    """Rows whose blocks end within a call, at its end, just before it, and nowhere near."""
    start = [BLOCK - 66, 3 * BLOCK - 65, 7 * BLOCK, 10]
    q, k, v = inputs(4, 130)
    old, new = sums(4)
    wanted = loop(q, k, v, old, new, start)
    state, recent, position = old.to(dtype), new.to(dtype), torch.tensor(start)
    outputs = []
    for part in zip(*(x.to(dtype).split(cuts, 1) for x in (q, k, v)), strict=True):
        o, state, recent = two_level(*part, state, recent, position, scale=2.0)
        position = position + o.shape[1]
        outputs.append(o)
    for got, exact in zip((torch.cat(outputs, 1), state, recent), wanted, strict=True):
        error = np.abs(got.double().numpy() - exact).max((1, 2, 3)) / np.abs(exact).max()
        assert error.max() < tolerance


def test_a_call_longer_than_blocks() -> None:
    """As in training: the part of the last block alone is recent."""
    q, k, v = inputs(1, 2 * BLOCK + 100)
    old, new = sums(1)
    _, state, recent = two_level(q, k, v, old, new, torch.tensor([50]))
    each = torch.einsum("bthk,bthv->bthkv", k, v)
    torch.testing.assert_close(recent, each[:, -150:].sum(1))
    torch.testing.assert_close(state, old + new + each[:, :-150].sum(1))


def test_rows_end_where_lengths_say() -> None:
    q, k, v = (x.float() for x in inputs(4, 64))
    old, new = (x.float() for x in sums(4))
    position, lengths = torch.tensor([BLOCK - 9] * 4), torch.tensor([0, 8, 9, 64])
    _, state, recent = two_level(q, k, v, old, new, position, lengths=lengths)
    assert torch.equal(state[0], old[0]) and torch.equal(recent[0], new[0])
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        one = slice(row, row + 1)
        alone = (x[one, :length] for x in (q, k, v))
        _, wanted, wanted_recent = two_level(*alone, old[one], new[one], position[one])
        torch.testing.assert_close(state[one], wanted)
        torch.testing.assert_close(recent[one], wanted_recent)
    assert recent[2].abs().max() == 0  # a block that is just full


def test_no_increment_is_lost_where_float32_drops_them() -> None:
    """Two blocks end behind 2^26, where a float32 is a multiple of 8 and stays as it is."""
    time, start = 4_200, 300 * BLOCK - 50
    q, k, v = (x.float() for x in inputs(1, time))
    large = torch.full((1, HEADS, KEY, VALUE), float(2**26))
    state, recent, ordinary = large, torch.zeros_like(large), large
    for t in range(time):
        part = [x[:, t : t + 1] for x in (q, k, v)]
        _, state, recent = two_level(*part, state, recent, torch.tensor([start + t]))
        _, ordinary = linear(*part, None, ordinary)
    exact = torch.einsum("bthk,bthv->bhkv", k.double(), v.double())
    found = state.double() - 2**26 + recent.double()
    assert (found - exact).abs().max() < 0.01 * exact.max()
    assert torch.equal(ordinary, large)
