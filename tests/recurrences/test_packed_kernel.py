"""The kernels of the linear recurrence over packed sequences, against a float64 loop for each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from linear_cases import DECAYS, error, make
from torch import Tensor

from edgelin.recurrences.linear import linear, reference

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
    """By the kernels: on a GPU by the public function, which elsewhere would pad."""
    from edgelin.recurrences.linear import on_gpu

    ends = tuple(accumulate(lengths, initial=0))
    leaves = {n: None if x is None else x.to(device).detach().requires_grad_()
              for n, x in made.items()}  # fmt: skip
    if device == "cuda":
        outputs = linear(**leaves, scale=SCALE, eps=EPS, cu_seqlens=torch.tensor(ends))
    elif "normalizer" in made:
        outputs = on_gpu.run_normalized(*leaves.values(), SCALE, EPS, ends)
    else:
        outputs = on_gpu.run_packed(*leaves.values(), SCALE, ends)
    given = {n: x for n, x in leaves.items() if x is not None}
    grads = torch.autograd.grad(outputs, list(given.values()), [up.to(device) for up in ups])
    pairs = zip(given, grads, strict=True)
    return named(list(outputs)) | {f"d{n}": grad for n, grad in pairs}


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
    made = draw(decay, lengths, heads=1 if decay == "key" else 2, key=20, value=12)
    check(made, lengths, device, 5e-6)


@pytest.mark.parametrize("lengths", [[1], [0, 9], [9, 0], [70], [7, 7, 7]])
def test_few_sequences(lengths: list[int], device: str, short_segments: None) -> None:
    for decay in ("head", "key"):
        check(draw(decay, lengths, heads=1), lengths, device, 5e-6)


@pytest.mark.parametrize("hard", ["mix", "reset"])
def test_hard_decays(hard: str, device: str, short_segments: None) -> None:
    for decay in ("head", "key"):
        made = draw(decay, [40, 0, 67], heads=1, hard=hard)
        check(made, [40, 0, 67], device, 2e-5)


@pytest.mark.parametrize("normal", [1, 2])
@pytest.mark.parametrize("decay", ["none", "head"])
@pytest.mark.parametrize("lengths", [SHORT, [65, 0, 1, 40]], ids=["short", "long"])
def test_normalizer(
    lengths: list[int], decay: str, normal: int, device: str, short_segments: None
) -> None:
    check(draw(decay, lengths, normal=normal, key=20, value=12), lengths, device, 5e-6)


@pytest.mark.parametrize("normal", [0, 1])
def test_one_head_of_queries_and_keys_for_all(
    normal: int, device: str, short_segments: None
) -> None:
    made = draw("head", [40, 3], heads=3, normal=normal)
    made |= {n: made[n][:, :, :1].expand(-1, -1, 3, -1) for n in ("q", "k")}
    check(made, [40, 3], device, 5e-6)


@pytest.mark.parametrize("hard", [None, "mix"])
@pytest.mark.parametrize("decay", DECAYS)
def test_bfloat16(decay: str, hard: str | None, device: str, short_segments: None) -> None:
    """Decays of a key that are too fast for some segments are left to their own kernels."""
    if decay == "none" and hard:
        pytest.skip("there is no decay")
    lengths = [66, 0, 1, 130, 64]
    made = draw(decay, lengths, dtype=torch.bfloat16, key=64, value=64, heads=1, hard=hard)
    check(made, lengths, device, 3e-2)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_sequences_hand_their_states_and_gradients_on(
    dtype: torch.dtype, decay: str, device: str
) -> None:
    made = draw(decay, [0, 9, 0], dtype=dtype, key=64, value=64, heads=1)
    ups = [torch.ones_like(made["v"]), torch.randn(made["state"].shape)]
    found = run(made, [0, 9, 0], ups, device)
    for n in (0, 2):
        assert torch.equal(found["state"][n].cpu(), made["state"][n])
        torch.testing.assert_close(found["dstate"][n].cpu(), ups[1][n])


def test_other_ends_are_other_numbers_for_the_same_launches(
    device: str, short_segments: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch has other ends: nothing may be compiled for it."""
    from edgelin.recurrences import launches

    made, count = Launches(launches.Launch.__init__), []
    monkeypatch.setattr(launches.Launch, "__init__", lambda *x, **y: made(*x, **y))
    for lengths in ([70, 5], [40, 35], [30, 0, 20, 25], [75], [1, 72, 2]):
        x = draw("key", lengths, heads=1)
        run(x, lengths, [x["v"], x["state"]], device)
        count.append(made.count)
    assert 0 < count[0] < count[1] and count[1:] == count[1:2] * 4


class Launches:
    """Counts what is made."""

    def __init__(self, make: Callable[..., None]) -> None:
        self.make, self.count = make, 0

    def __call__(self, *inputs: Any, **constants: Any) -> None:
        self.count += 1
        self.make(*inputs, **constants)


def test_tables_are_made_once_and_outside_inference(device: str) -> None:
    from edgelin.recurrences.linear.kernel_places import in_packed_rows

    arguments = (0, 5, 40), 2, 16, 32, 256, torch.device(device)
    with torch.inference_mode():
        places, _ = in_packed_rows(*arguments)
    assert in_packed_rows(*arguments)[0] is places
    assert not places.segments.lines.is_inference()


@pytest.mark.parametrize("normal", [0, 2])
def test_op_registration(normal: int, device: str) -> None:
    """Schema, fake and autograd registrations agree."""
    made = draw("head", [2, 5], normal=normal, heads=1)
    leaves = [x.to(device).requires_grad_() for x in made.values()]
    op = torch.ops.edgelin.linear_normalized if normal else torch.ops.edgelin.linear_packed
    numbers = (SCALE, EPS, [0, 2, 7]) if normal else (SCALE, [0, 2, 7])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.default, (*leaves, *numbers), test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("key, value", [(64, 64), (128, 128), (64, 128), (20, 36), (320, 64)])
def test_on_a_gpu(
    key: int, value: int, dtype: torch.dtype, bound: float, decay: str, device: str
) -> None:
    """Several segments and one, at widths that kernels take as they are and others."""
    lengths = [1100, 0, 1, 513, 64, 63, 65]
    check(draw(decay, lengths, dtype=dtype, key=key, value=value), lengths, device, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("normal", [1, 2])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
def test_normalizer_on_a_gpu(
    dtype: torch.dtype, bound: float, decay: str, normal: int, device: str
) -> None:
    if decay == "key" and dtype == torch.bfloat16:
        pytest.skip("sums that are not taken along are rounded to bfloat16")
    lengths = [1100, 0, 1, 513, 64, 63, 65]
    made = draw(decay, lengths, dtype=dtype, key=128, value=64, normal=normal)
    check(made, lengths, device, bound * (10 if normal == 2 else 1))
