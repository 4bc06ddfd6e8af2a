"""Padding to the widths that the GPU kernels take changes nothing."""

from __future__ import annotations

import pytest
import torch

from edgelin.recurrences import widths
from edgelin.recurrences.delta.reference import reference as delta_reference
from edgelin.recurrences.linear.reference import forward as linear_reference


@pytest.mark.parametrize("key, value", [(20, 36), (64, 1), (65, 128)])
@pytest.mark.parametrize("decay", ["none", "head", "key"])
def test_padded_equals_narrow(key: int, value: int, decay: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 3, key).double(), torch.randn(2, 5, 3, key).double()
    v, state = torch.randn(2, 5, 3, value).double(), torch.randn(2, 3, key, value).double()
    g = {"none": None, "head": -torch.rand(2, 5, 3), "key": -torch.rand(2, 5, 3, key)}[decay]
    seen = []

    def run(q, k, v, g, state):  # type: ignore[no-untyped-def]
        seen.append((k.shape[-1], v.shape[-1], state.shape[-2:]))
        return linear_reference(q, k, v, g, state, 0.5)

    o, final = widths.run_padded(run, q, k, v, g, state)
    want_o, want_final = linear_reference(q, k, v, g, state, 0.5)
    torch.testing.assert_close(o, want_o)
    torch.testing.assert_close(final, want_final)
    assert all(size % 64 == 0 for size in (*seen[0][:2], *seen[0][2]))


@pytest.mark.parametrize("decay", ["none", "head", "key"])
def test_keys_in_pieces_are_all_keys(decay: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 5, 3, 600).double()
    v, state = torch.randn(2, 5, 3, 4).double(), torch.randn(2, 3, 600, 4).double()
    g = {"none": None, "head": -torch.rand(2, 5, 3), "key": -torch.rand(2, 5, 3, 600)}[decay]
    seen = []

    def run(q, k, v, g, state):  # type: ignore[no-untyped-def]
        seen.append(k.shape[-1])
        return linear_reference(q, k, v, g, state, 0.5)

    got = widths.run_by_keys(run, q, k, v, g, state)
    for a, b in zip(got, linear_reference(q, k, v, g, state, 0.5), strict=True):
        torch.testing.assert_close(a, b)
    assert seen == [256, 256, 88]


def test_padded_delta_and_its_gradients() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(1, 5, 2, n).double().requires_grad_() for n in (20, 20, 36)]
    beta = torch.rand(1, 5, 2).double()
    state = torch.randn(1, 2, 20, 36).double().requires_grad_()

    def run(q, k, v, g, state):  # type: ignore[no-untyped-def]
        return delta_reference(q, k, v, beta, g, state, scale=0.5)

    padded = widths.run_padded(run, *leaves, None, state)
    narrow = run(*leaves, None, state)
    for a, b in zip(padded, narrow, strict=True):
        torch.testing.assert_close(a, b)
    inputs = [*leaves, state]
    got = torch.autograd.grad(sum(x.square().sum() for x in padded), inputs)
    want = torch.autograd.grad(sum(x.square().sum() for x in narrow), inputs)
    torch.testing.assert_close(got, want)


def test_only_narrow_bfloat16_on_a_gpu_is_padded() -> None:
    narrow = torch.empty(1, 1, 1, 20, dtype=torch.bfloat16)
    assert not widths.needs_padding(narrow, narrow)  # the chunked form takes any width
    assert not widths.needs_padding(narrow.to("meta"), narrow.to("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("key, value, want", [(20, 64, True), (64, 1, True), (64, 128, False)])
def test_narrow_bfloat16_is_padded(key: int, value: int, want: bool) -> None:
    k = torch.zeros(1, 1, 1, key, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros(1, 1, 1, value, dtype=torch.bfloat16, device="cuda")
    assert widths.needs_padding(k, v) == want
    assert not widths.needs_padding(k.float(), v.float())
