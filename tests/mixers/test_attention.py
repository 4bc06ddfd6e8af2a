"""Attention over all tokens, from the empty cache on; its other claims are in test_mixers.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from loops import attention as reference
from loops.common import EPS, HIDDEN, LAYER
from torch import Tensor

from edgelin import mixers
from edgelin.errors import EdgelinError

CASES = [name for name, table in reference.CASES.items() if not table["window"]]


def build(case: str) -> Any:
    torch.manual_seed(7)
    return mixers.build(reference.CASES[case], HIDDEN, LAYER, EPS, where="model.mixers.m")


def empty(mixer: Any, batch: int) -> dict[str, Tensor]:
    return {s.name: torch.zeros(batch, *s.sized()) for s in mixer.state_specs()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cuts", [[130], [1] * 70, [64, 65, 1], [65, 65], [1, 129]], ids=str)
def test_the_first_tokens_are_the_loop(case: str, cuts: list[int]) -> None:
    mixer = build(case)
    x = torch.randn(3, sum(cuts), HIDDEN, dtype=torch.float64)
    arrays = {name: tensor.numpy() for name, tensor in empty(mixer, 3).items()}
    wanted, states = reference.loop(mixer, x.numpy(), arrays, np.zeros(3, int))
    for dtype, limit in ((torch.float32, 2e-5), (torch.float64, 1e-9)):
        mixer, state, position, pieces = mixer.to(dtype), empty(mixer, 3), torch.zeros(3).long(), []
        state = {name: tensor.to(dtype) for name, tensor in state.items()}
        for piece in x.to(dtype).split(cuts, dim=1):
            y, state = mixer(piece, state, position)
            position = position + piece.shape[1]
            pieces.append(y)
        y = torch.cat(pieces, dim=1).detach()
        np.testing.assert_allclose(y, wanted, rtol=0, atol=limit * np.abs(wanted).max())
        for name, array in states.items():
            found = state[name].detach()
            np.testing.assert_allclose(found, array, rtol=0, atol=limit * np.abs(array).max())


@pytest.mark.parametrize("case", CASES)
def test_training_sequences_get_the_gradients_of_single_steps(case: str) -> None:
    """A sequence from the empty cache takes the fused kernel, single steps the written-out form."""
    x = torch.randn(2, 70, HIDDEN, dtype=torch.float64)
    weights = torch.randn(2, 70, HIDDEN, dtype=torch.float64)
    found = []
    for size in (70, 1):
        mixer, position, pieces = build(case).double(), torch.zeros(2).long(), []
        state = {name: tensor.double() for name, tensor in empty(mixer, 2).items()}
        for piece in x.split(size, dim=1):
            y, state = mixer(piece, state, position)
            position = position + size
            pieces.append(y)
        (torch.cat(pieces, dim=1) * weights).sum().backward()
        found.append({name: p.grad for name, p in mixer.named_parameters()})
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_two_norms_of_queries_and_keys_are_refused() -> None:
    table = {**reference.CASES["attention, all tokens"], "qk_norm": True, "joint_qk_norm": True}
    with pytest.raises(EdgelinError, match="qk_norm and joint_qk_norm are both set; choose one"):
        mixers.build(table, HIDDEN, LAYER, EPS, where="model.mixers.m")
