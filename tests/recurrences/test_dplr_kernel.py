"""Triton kernels of the diagonal plus low rank recurrence against float64 loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comparisons import error, out_gradients, rounded, to
from torch import Tensor
from torch.nn.functional import normalize

NAMES = ("q", "k", "v", "a", "b", "g", "state")
SCALE = 0.5
DECAYS = {
    "none": lambda chance: torch.zeros_like(chance),
    "rwkv7": lambda chance: -0.607 * chance,
    "strong": lambda chance: torch.full_like(chance, -20.0),
    "mixed": lambda chance: torch.where(chance < 0.5, -20.0, -0.001).to(chance.dtype),
    "floor": lambda chance: torch.where(chance < 0.1, -90.0, -0.01).to(chance.dtype),
    "below": lambda chance: torch.where(chance < 0.2, -1000.0, -0.01).to(chance.dtype),
}
Inputs = dict[str, Tensor]


def inputs(
    time: int,
    *,
    batch: int = 1,
    heads: int = 1,
    key: int = 12,
    value: int = 9,
    decay: str = "rwkv7",
    beta: float | None = None,
) -> Inputs:
    """Float64 inputs of KDA (RWKV-7 where the decay is ``rwkv7``); with ``beta`` one key for all.

    Both read along a unit key and add against it; RWKV-7 adds under a direction of its own.
    """
    generator = torch.Generator().manual_seed(time)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = draw(batch, time, heads, key), normalize(draw(batch, time, heads, key), dim=-1)
    v, state = draw(batch, time, heads, value), draw(batch, heads, key, value)
    strength = torch.sigmoid(draw(batch, time, heads, 1))
    chance = torch.rand(batch, time, heads, key, generator=generator, dtype=torch.float64)
    g = DECAYS[decay](chance)
    if beta is not None:
        k, strength = k[:, :1].expand(k.shape).clone(), torch.full_like(strength, beta)
    if decay == "rwkv7" and beta is None:
        a, b = -k, k * torch.sigmoid(draw(batch, time, heads, key))
        k = k * (1 + 0.5 * draw(batch, time, heads, key))
    else:
        a, b, k = g.clamp(min=-90).exp() * k, -strength * k, strength * k
    return dict(zip(NAMES, (q, k, v, a, b, g, state), strict=True))


def loop(made: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """o and the last state, one token of one head at a time."""
    q, k, v, a, b, g, state = (x.detach().numpy().copy() for x in made.values())
    o = np.zeros(v.shape)
    for i, t, h in np.ndindex(*v.shape[:3]):
        s = state[i, h]
        read = a[i, t, h] @ s
        s = np.exp(np.maximum(g[i, t, h], -90))[:, None] * s
        s = s + np.outer(b[i, t, h], read) + np.outer(k[i, t, h], v[i, t, h])
        state[i, h], o[i, t, h] = s, SCALE * q[i, t, h] @ s
    return o, state


def expected_results(made: Inputs, device: str = "cpu") -> list[Tensor]:
    """o, the last state and the gradients of all inputs by autograd through a float64 loop."""
    leaves = [x.to(device).requires_grad_() for x in made.values()]
    q, k, v, a, b, g, state = leaves
    decay = g.clamp(min=-90).exp()
    outputs = []
    for t in range(q.shape[1]):
        read = torch.einsum("bhk,bhkv->bhv", a[:, t], state)
        state = decay[:, t, :, :, None] * state + b[:, t, :, :, None] * read[:, :, None]
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(SCALE * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    made_outputs = torch.stack(outputs, dim=1), state
    weights = [w.to(device) for w in out_gradients(made)]
    return [*made_outputs, *torch.autograd.grad(made_outputs, leaves, weights)]


def kernel_results(made: Inputs, dtype: torch.dtype, device: str) -> list[Tensor]:
    """The same from the kernels."""
    from edgelin.recurrences.dplr import kernel, kernel_backward

    arguments = to(made, dtype, device)
    do, dstate = out_gradients(made)
    *outputs, carried = kernel.forward(*arguments, SCALE)
    ups = do.to(device, dtype), dstate.to(device, torch.float32)
    kept = kernel.Carried.of(carried.distinct())
    gradients = kernel_backward.backward(*arguments, SCALE, *ups, kept)
    again = kernel_backward.backward(*arguments, SCALE, *ups)
    assert all(map(torch.equal, gradients, again))
    return [*outputs, *gradients]


def close(made: Inputs, dtype: torch.dtype, device: str, bound: float) -> None:
    """Assert that values and gradients agree, and with which dtypes they come."""
    results, expected = kernel_results(made, dtype, device), expected_results(made, device)
    names = ("o", "last", *("d" + name for name in NAMES))
    errors = {n: error(r, e) for n, r, e in zip(names, results, expected, strict=True)}
    if dtype == torch.bfloat16:
        # A decay's gradient is a sum of q dq - k dk - ..., so these products set its error.
        truth = dict(zip(names, (x.detach() for x in expected), strict=True))
        noise = (made["q"].detach().to(device) * truth["dq"]).abs().max() / truth["dg"].abs().max()
        errors["dg"] /= max(1.0, float(noise))
    assert max(errors.values()) < bound and not any(e != e for e in errors.values()), errors
    wide = {"last", "dg", "dstate"}
    kinds = {n: torch.float32 if n in wide else dtype for n in names}
    assert dict(zip(names, (r.dtype for r in results), strict=True)) == kinds
    assert all(r.is_contiguous() for r in results)


@pytest.mark.parametrize("decay", DECAYS)
def test_the_expected_values_are_the_equation(decay: str) -> None:
    made = inputs(9, batch=2, heads=2, decay=decay)
    for result, expected in zip(expected_results(made), loop(made), strict=False):
        np.testing.assert_allclose(result.detach(), expected, atol=1e-12)


@pytest.mark.parametrize("decay", ["rwkv7", "mixed"])
@pytest.mark.parametrize(
    "time, key, value, batch, heads",
    [
        (1, 8, 20, 3, 2),
        (15, 20, 8, 1, 1),
        (16, 8, 8, 1, 1),
        (63, 12, 9, 1, 2),
        (64, 8, 20, 1, 1),
        (65, 20, 8, 3, 1),
        (130, 12, 9, 1, 1),
        (40, 36, 40, 1, 1),  # several blocks of keys and of values
    ],
)
def test_kernels(
    time: int, key: int, value: int, batch: int, heads: int, decay: str, device: str
) -> None:
    made = inputs(time, key=key, value=value, batch=batch, heads=heads, decay=decay)
    close(made, torch.float32, device, 1e-5)


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("decay", DECAYS)
def test_kernels_with_one_key_for_all_tokens(decay: str, beta: float, device: str) -> None:
    close(inputs(70, decay=decay, beta=beta), torch.float32, device, 1e-4)


@pytest.mark.parametrize("decay", DECAYS)
def test_kernels_at_any_decay(decay: str, device: str) -> None:
    close(inputs(70, decay=decay), torch.float32, device, 1e-5)


def test_mild_and_strong_decays_in_chunks_of_several_heads(device: str) -> None:
    """Each chunk is computed once: the mild ones by some programs, the others by others."""
    made = inputs(70, batch=2, heads=2, decay="mixed")
    made["g"][0, :64, 1] = made["g"][1, :64] = made["g"][1, 64:, 1] = -0.001
    close(made, torch.float32, device, 1e-5)


def test_mild_and_strong_decays_of_the_keys_of_a_chunk(device: str) -> None:
    """Blocks of keys are looked at apart; one strong one makes the chunk's other block strong."""
    made = inputs(70, key=40, decay="none")
    made["g"][..., 35] = -20.0
    close(made, torch.float32, device, 1e-5)


def test_kernels_of_strong_decays_load_nothing_ahead() -> None:
    """With three stages their numbers changed from call to call on an H200 (Triton 3.6)."""
    from edgelin.recurrences.dplr import kernel, kernel_backward
    from edgelin.recurrences.dplr.kernel_inputs import Shape

    shape = Shape(8, 4096, 16, 128, 128, tied=True, full=False, on_gpu=True, sequences=0)
    far = [
        kernel._split(shape, True),
        kernel._pairs(shape, True),
        kernel_backward._left(shape, 1.0, True),
        kernel_backward._right(shape, True),
    ]
    assert [launch.constants["num_stages"] for launch in far] == [1] * 4


def test_no_gradient_below_the_floor(device: str) -> None:
    made = inputs(10, decay="below")
    dg = kernel_results(made, torch.float32, device)[7]
    assert torch.equal(dg.cpu() == 0, made["g"] < -90)


def test_kernels_of_nothing(device: str) -> None:
    made = {n: torch.zeros_like(x) for n, x in inputs(5).items()}
    results = kernel_results(made, torch.float32, device)
    assert all(not r.any() for r in results[:2])
    close(made, torch.float32, device, 1e-6)


@pytest.mark.parametrize("decay", ["rwkv7", "mixed"])
def test_kernels_in_bfloat16(decay: str, device: str, bfloat16_dots: None) -> None:
    made = rounded(inputs(70, key=20, value=9, decay=decay), torch.bfloat16)
    close(made, torch.bfloat16, device, 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(
    "time, key, value, heads",
    [(300, 64, 64, 2), (300, 128, 128, 2), (300, 64, 128, 40), (130, 128, 64, 2), (1, 64, 64, 2)],
)
def test_kernels_on_a_gpu(
    time: int, key: int, value: int, heads: int, decay: str, dtype: torch.dtype, bound: float
) -> None:
    made = inputs(time, batch=2, heads=heads, key=key, value=value, decay=decay)
    made["q"] = made["q"] * key**-0.5
    close(rounded(made, dtype), dtype, "cuda", bound)


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("decay", ["none", "mixed"])
def test_repeated_keys_on_a_gpu(decay: str, beta: float) -> None:
    made = inputs(300, heads=2, key=64, value=64, decay=decay, beta=beta)
    close(rounded(made, torch.float32), torch.float32, "cuda", 1e-3)
