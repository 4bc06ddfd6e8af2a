"""The delta rules' kernels over packed sequences: each gives what its own float64 loop gives."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from comparisons import Inputs, rounded, to
from delta_cases import SCALE, close, inputs, with_gradients
from torch import Tensor

from edgelin.recurrences.delta import delta, on_gpu
from edgelin.recurrences.delta.reference import reference as delta_loop
from edgelin.recurrences.dplr import dplr
from edgelin.recurrences.dplr import on_gpu as dplr_on_gpu
from edgelin.recurrences.dplr.reference import reference as dplr_loop

LENGTHS = [1, 63, 64, 65, 0, 130, 0]
DECAYS = ("none", "head", "key", "rwkv7")


def packed_inputs(lengths: list[int], decay: str = "head", **options: Any) -> Inputs:
    """Random inputs whose row holds sequences; the states of all are not zero."""
    by_key = decay in ("key", "rwkv7")
    made = inputs(sum(lengths), batch=1, gated=decay != "none", by_key=by_key, **options)
    generator = torch.Generator().manual_seed(7)
    state, k = made.pop("state"), made["k"]
    assert state is not None and k is not None
    if decay == "rwkv7":
        del made["beta"]
        g = made.pop("g")
        share = torch.rand(k.shape, generator=generator, dtype=torch.float64)
        made |= {"a": -k, "b": share * k, "g": g}
    shape = (len(lengths), *state.shape[1:])
    return made | {"state": torch.randn(shape, generator=generator, dtype=torch.float64)}


def ends(lengths: list[int]) -> tuple[int, ...]:
    """Where they end, 0 first."""
    return (0, *accumulate(lengths))


def one_by_one(loop: Any, lengths: list[int]) -> Any:
    """The loop over every sequence alone."""

    def run(*inputs: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        *steps, state = inputs
        assert state is not None
        outputs, after = [], []
        for n, (begin, end) in enumerate(pairwise(ends(lengths))):
            mine, last = state[n : n + 1], state[n : n + 1]
            if end > begin:
                parts = [None if x is None else x[:, begin:end] for x in steps]
                o, last = loop(*parts, mine, scale=scale)
                outputs.append(o)
            after.append(last)
        return torch.cat(outputs, dim=1), torch.cat(after)

    return run


def check(
    lengths: list[int], made: Inputs, dtype: torch.dtype, device: str, bound: float
) -> list[Tensor]:
    """Compare the kernels' values and gradients with the loop's."""
    made, general = rounded(made, dtype), "a" in made
    loop, op, operator = (
        (dplr_loop, dplr, dplr_on_gpu.run_packed)
        if general
        else (delta_loop, delta, on_gpu.run_packed)
    )

    def kernels(*inputs: Any, scale: float) -> tuple[Tensor, Tensor]:
        if device == "cuda":
            return op(*inputs, scale=scale, cu_seqlens=torch.tensor(ends(lengths)))
        o, state = operator(*inputs, scale, ends(lengths))
        return o, state

    results = with_gradients(kernels, to(made, dtype, device), made)
    expected = with_gradients(one_by_one(loop, lengths), to(made, torch.float64, device), made)
    close(results, expected, bound)
    return results


@pytest.mark.parametrize("decay", DECAYS)
def test_kernels(decay: str, device: str) -> None:
    made = packed_inputs(LENGTHS, decay, key=20, value=36)
    results = check(LENGTHS, made, torch.float32, device, 2e-5)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in results)


@pytest.mark.parametrize("lengths", [[1], [130], [0, 5, 0], [7, 7, 7], [2, 70]])
def test_few_sequences(lengths: list[int], device: str) -> None:
    check(lengths, packed_inputs(lengths, heads=3), torch.float32, device, 2e-5)


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("kind", ["same keys, beta 2", "mixed decay", "reset"])
def test_kernels_at_hard_inputs(kind: str, decay: str, device: str) -> None:
    lengths = [3, 66, 64, 1]
    check(lengths, packed_inputs(lengths, decay, kind=kind, heads=1), torch.float32, device, 1e-4)


@pytest.mark.parametrize("decay", ["head", "key", "rwkv7"])
def test_kernels_in_bfloat16(decay: str, device: str, bfloat16_dots: None) -> None:
    made = packed_inputs([3, 66, 0, 64], decay, key=64, value=128, heads=1)
    results = check([3, 66, 0, 64], made, torch.bfloat16, device, 3e-2)
    assert [r.dtype for r in results[:2]] == [torch.bfloat16, torch.float32]


def test_an_empty_sequence_hands_its_state_and_gradient_on(device: str) -> None:
    made = packed_inputs([0, 9])
    arguments = to(made, torch.float32, device)
    state = arguments[-1].requires_grad_()
    _, after = on_gpu.run_packed(*arguments, SCALE, (0, 0, 9))
    assert torch.equal(after[0], state[0])
    up = torch.randn_like(after)
    (grad,) = torch.autograd.grad(after, state, up)
    assert torch.equal(grad[0], up[0]) and not torch.equal(grad[1], up[1])


def test_a_sequence_does_not_see_nan_of_another(device: str) -> None:
    lengths = [5, 66, 64]
    made = packed_inputs(lengths)
    arguments = to(made, torch.float32, device)
    whole, states = on_gpu.run_packed(*arguments, SCALE, ends(lengths))
    arguments[2][:, 5:71] = torch.nan
    o, after = on_gpu.run_packed(*arguments, SCALE, ends(lengths))
    for kept in (slice(0, 5), slice(71, None)):
        assert torch.equal(o[:, kept], whole[:, kept])
    assert torch.equal(after[::2], states[::2]) and after[1].isnan().any()


def test_training_after_inference(device: str) -> None:
    """The tables that are kept can be trained with, whoever was first."""
    made = packed_inputs([20, 1, 22])
    arguments = to(made, torch.float32, device)
    with torch.inference_mode():
        on_gpu.run_packed(*arguments, SCALE, (0, 20, 21, 43))
    arguments[0].requires_grad_()
    on_gpu.run_packed(*arguments, SCALE, (0, 20, 21, 43))[0].sum().backward()
    assert arguments[0].grad is not None and arguments[0].grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(
    "lengths, key, value, heads",
    [
        ([*LENGTHS, 300], 64, 64, 2),
        ([1, 700, 64, 0, 259], 128, 128, 16),
        ([130] * 9, 64, 128, 40),
        (LENGTHS, 36, 20, 2),
    ],
)
def test_kernels_on_a_gpu(
    lengths: list[int], key: int, value: int, heads: int, decay: str, dtype: torch.dtype,
    bound: float,
) -> None:  # fmt: skip
    made = packed_inputs(lengths, decay, heads=heads, key=key, value=value)
    made["q"] = made["q"] * key**-0.5  # type: ignore[operator]
    check(lengths, made, dtype, "cuda", bound)


@pytest.mark.gpu
def test_other_ends_compile_nothing() -> None:
    from edgelin.recurrences.delta import kernel, kernel_backward

    def compiled() -> int:
        kernels = (kernel.states_kernel, kernel.output_kernel, kernel_backward.keys_kernel)
        return sum(len(caches[0]) for k in kernels for caches in k.device_caches.values())

    counts = []
    for lengths in ([64, 64], [65, 63, 0, 1], [1, 17, 200], [128, 5]):
        made = packed_inputs(lengths, key=64, value=64)
        check(lengths, made, torch.bfloat16, "cuda", 3e-2)
        counts.append(compiled())
    assert counts == counts[:1] * 4
