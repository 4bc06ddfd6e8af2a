"""Data order: what every epoch covers, and that it depends on nothing but seed and step."""

from __future__ import annotations

import pytest
import torch

from edgelin.config import OptimConfig
from edgelin.errors import EdgelinError
from edgelin.train.order import Order

TOKENS = torch.arange(103, dtype=torch.int32)
OPTIM = OptimConfig(batch_size=3, sequence_length=8, steps=1)


def _order(seed: int = 5, *, carry: bool) -> Order:
    return Order(TOKENS, OPTIM, seed, carry_state=carry)


@pytest.mark.parametrize("carry", [False, True])
def test_order_depends_on_seed_and_step_alone(carry: bool) -> None:
    steps = [_order(carry=carry).batch(step) for step in range(12)]
    one = _order(carry=carry)
    for step in (11, 3, 7, 0, 4):
        inputs, targets = one.batch(step)
        assert torch.equal(inputs, steps[step][0])
        assert torch.equal(targets, steps[step][1])
        assert torch.equal((inputs + 1) % 103, targets)
        assert inputs.shape == (3, 8)
        assert inputs.dtype == targets.dtype == torch.int64
    assert not torch.equal(_order(6, carry=carry).batch(0)[0], steps[0][0])


def test_an_epoch_of_windows_reads_no_token_twice() -> None:
    order = _order(carry=False)
    assert order.steps_per_epoch == 3  # 103 // 8 - 1 = 11 windows
    seen = []
    for epoch in range(4):
        steps = range(3 * epoch, 3 * epoch + 3)
        tokens = torch.cat([order.batch(step)[0].flatten() for step in steps])
        assert len(tokens.unique()) == 9 * 8
        offset = {int(order.starts(step)[0]) % 8 for step in steps}
        assert len(offset) == 1
        seen.append((offset.pop(), tuple(tokens.tolist())))
    assert len({offset for offset, _ in seen}) > 1
    assert len({tokens for _, tokens in seen}) == 4


def test_carried_rows_are_contiguous_within_an_epoch() -> None:
    order = _order(carry=True)
    assert [order.begins(step) for step in range(7)] == [True, False, False] * 2 + [True]
    for epoch in range(3):
        rows = torch.cat([order.batch(3 * epoch + i)[0] for i in range(3)], dim=1)
        assert torch.equal(rows, (rows[:, :1] + torch.arange(24)) % 103)
        assert len(rows.unique()) == 3 * 24
    assert not torch.equal(order.batch(0)[0], order.batch(3)[0])


def test_shuffled_windows_always_begin() -> None:
    assert all(_order(carry=False).begins(step) for step in range(5))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(EdgelinError, match="holds 31 tokens, one batch needs 32; lower optim"):
        Order(TOKENS[:31], OPTIM, 0, carry_state=False)
    Order(TOKENS[:32], OPTIM, 0, carry_state=False).batch(0)
