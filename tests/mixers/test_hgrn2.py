"""What is special to HGRN2: its gates keep their bound and their digits."""

from __future__ import annotations

import math

import pytest
import torch
from loops.common import LINEAR

from edgelin import mixers
from edgelin.errors import EdgelinError


@pytest.mark.parametrize("bound", [0.0, 1e-6, 0.4, 0.999])
def test_gates_at_any_input(bound: float) -> None:
    """f stays in [l, 1], f and 1 - f keep their digits, and gradients stay finite."""
    table = {"type": "hgrn2", **LINEAR, "lower_bound": bound}
    mixer = mixers.build(table, 1, 0, 1e-6, where="m")
    torch.nn.init.ones_(mixer.decay_proj.weight)
    inputs = torch.tensor([-1e4, -30.0, -1.0, 0.0, 1.0, 30.0, 1e4])
    k, g = mixer._gates(inputs[:, None])
    (k.sum() + g.clamp(min=-90).sum()).backward()
    for parameter in (mixer.decay_proj.weight, getattr(mixer, "lower_bound_logit", None)):
        assert parameter is None or parameter.grad.isfinite().all()
    for row, value in enumerate(inputs.tolist()[1:-1], start=1):
        write = (1 - bound) / (1 + math.exp(value))
        lost = bound == 0 and value < -20  # then float64 has no digits of f left in 1 - write
        decay = value if lost else math.log1p(-write)
        torch.testing.assert_close(k[row], torch.full_like(k[row], write), rtol=2e-5, atol=0)
        torch.testing.assert_close(g[row], torch.full_like(g[row], decay), rtol=2e-5, atol=1e-6)
    assert (g <= 0).all() and (k >= 0).all()
    assert g[0].min() >= (math.log(bound) - 1e-3 if bound else -1e4)


@pytest.mark.parametrize("bound", [-0.1, 1.0])
def test_a_wrong_bound_is_refused(bound: float) -> None:
    table = {"type": "hgrn2", **LINEAR, "lower_bound": bound}
    with pytest.raises(EdgelinError, match=r"lower_bound is .*give a number from 0 to below 1"):
        mixers.build(table, 20, 0, 1e-6, where="m")
