"""The kernels of the linear recurrence over packed sequences, against a float64 loop for each."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from linear_cases import DECAYS, error, make
from torch import Tensor

from edgelin.recurrences.linear import reference

SCALE, EPS = 0.3, 1e-2
NAMES = ("q", "k", "v", "g", "state", "normalizer", "floor")
STATES = ("state", "normalizer")
SHORT = [3, 0, 20, 1]  # a segment each
LONG = [65, 0, 1, 130, 64, 63]  # several, where segments are short
Inputs = dict[str, Any]


def draw(
    decay: str, lengths: list[int], dtype: torch.dtype = torch.float32, **options: Any
) -> Inputs:
    """q, k, v, g and the states of every sequence, with ``normal`` a normaliser, 2: and a floor."""
    normal = options.pop("normal", 0)
    q, k, v, g, _ = make(decay, sum(lengths), dtype=dtype, **options)
    rng = torch.Generator().manual_seed(7)
    state = torch.randn(len(lengths), *q.shape[2:], v.shape[3], generator=rng)
    made = {"q": q, "k": k, "v": v, "g": g, "state": state}
    if normal:
        made["normalizer"] = torch.rand(state.shape[:3], generator=rng)
        made["floor"] = 0.5 + torch.rand(v.shape[:3], generator=rng) if normal == 2 else None
    if normal == 1:
        made |= {n: made[n].abs() for n in ("q", "k", "state")}
    return made


def loop(x: Inputs) -> list[Tensor]:
    """The recurrence of one sequence, with what may be around it."""
    q, k, v, g, state = (x[n] for n in ("q", "k", "v", "g", "state"))
    o, state = reference.forward(q, k, v, g, state, SCALE)
    if "normalizer" not in x:
        return [o, state]
    ones = torch.ones_like(v[..., :1])
    sums, z = reference.forward(q, k, ones, g, x["normalizer"][..., None], SCALE)
    if x["floor"] is not None:
        sums = torch.maximum(sums.abs(), x["floor"][..., None])
    return [o / (sums + EPS), state, z[..., 0]]


def truth(made: Inputs, lengths: list[int], ups: list[Tensor]) -> dict[str, Tensor]:
    """Results and gradients, by autograd through every sequence's own loop."""
    leaves = {n: None if x is None else x.double().requires_grad_() for n, x in made.items()}
    results = []
    for n, (begin, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        mine = {name: None if x is None else x[n : n + 1] if name in STATES else x[:, begin:end]
                for name, x in leaves.items()}  # fmt: skip
        empty = [leaves["v"][:, begin:end], *(mine[name] for name in STATES if name in mine)]
        results.append(loop(mine) if end > begin else empty)
    o, *states = zip(*results, strict=True)
    outputs = [torch.cat(o, 1), *(torch.cat(x) for x in states)]
    given = {n: x for n, x in leaves.items() if x is not None}
    grads = torch.autograd.grad(outputs, list(given.values()), [up.double() for up in ups])
    return named(outputs) | {f"d{n}": x for n, x in zip(given, grads, strict=True)}


def named(outputs: list[Tensor]) -> dict[str, Tensor]:
    """Outputs by name."""
    return dict(zip(("o", *STATES), outputs, strict=False))


def run(made: Inputs, lengths: list[int], ups: list[Tensor], device: str) -> dict[str, Tensor]:
    """By the kernels."""
    from edgelin.recurrences.linear import kernel, kernel_backward, kernel_normalizer

    ends = tuple(accumulate(lengths, initial=0))
    moved = [None if x is None else x.to(device) for x in made.values()]
    moved_ups = [up.to(device) for up in ups]
    if "normalizer" in made:
        *outputs, kept = kernel_normalizer.forward(*moved, SCALE, EPS, ends)
        kept = [outputs[0], *kept]
        grads = kernel_normalizer.backward(*moved, SCALE, EPS, *moved_ups, kept, ends)
    else:
        outputs = list(kernel.forward(*moved, SCALE, ends))
        grads = kernel_backward.backward(*moved, SCALE, *moved_ups, ends)
    pairs = zip(made, grads, strict=True)
    return named(outputs) | {f"d{n}": grad for n, grad in pairs if made[n] is not None}


def check(made: Inputs, lengths: list[int], device: str, bound: float) -> None:
    """All results; a decay's gradient is a sum of q dq - k dk, whose rounding it has."""
    rng = torch.Generator().manual_seed(1)
    like = [made[n] for n in ("v", *STATES) if n in made]
    ups = [torch.randn(x.shape, generator=rng).to(x.dtype) for x in like]
    found, want = run(made, lengths, ups, device), truth(made, lengths, ups)
    assert list(found) == list(want)
    errors = {n: error(found[n], x) for n, x in want.items()}
    if "dg" in errors:
        noise = (made["q"].double() * want["dq"]).abs().max() / want["dg"].abs().max()
        errors["dg"] /= max(1.0, float(noise))
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("decay", DECAYS)
def test_gradients(decay: str, lengths: list[int], device: str, short_segments: None) -> None:
    check(draw(decay, lengths, key=20, value=12), lengths, device, 5e-6)


@pytest.mark.parametrize("normal", [1, 2])
@pytest.mark.parametrize("decay", ["none", "head"])
@pytest.mark.parametrize("lengths", [SHORT, [65, 0, 1, 40]], ids=["short", "long"])
def test_normalizer(
    lengths: list[int], decay: str, normal: int, device: str, short_segments: None
) -> None:
    check(draw(decay, lengths, normal=normal, key=20, value=12), lengths, device, 5e-6)
