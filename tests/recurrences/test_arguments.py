"""What does not fit together is refused, by all recurrences, in one line, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from edgelin.recurrences.arguments import Arguments
from edgelin.recurrences.conv import short_convolution
from edgelin.recurrences.delta import delta
from edgelin.recurrences.diagonal import diagonal
from edgelin.recurrences.dplr import dplr
from edgelin.recurrences.linear import linear
from edgelin.recurrences.rnn import rnn
from edgelin.recurrences.running_max import running_max

Inputs = dict[str, Tensor | None]
SIZES = {"B": 2, "T": 9, "H": 4, "G": 2, "K": 5, "V": 6, "D": 3, "N": 7, "C": 3, "W": 4, "L": 3}
MATRIX = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "state": "BHKV"}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "linear": (linear, MATRIX | {"g": "BTH"}),
    "linear, normaliser": (linear, MATRIX | {"g": "BTHK", "normalizer": "BHK", "floor": "BTH"}),
    "linear, bonus": (linear, MATRIX | {"g": "BTHK", "bonus": "HK"}),
    "delta": (delta, MATRIX | {"q": "BTGK", "k": "BTGK", "beta": "BTH", "g": "BTH"}),
    "delta, decay a key": (delta, MATRIX | {"beta": "BTH", "g": "BTHK"}),
    "dplr": (dplr, MATRIX | {"a": "BTHK", "b": "BTHK", "g": "BTHK"}),
    "diagonal": (diagonal, {"x": "BTD", "b": "DN", "c": "DN", "g": "DN", "state": "BDN"}),
    "diagonal, selective": (
        diagonal, {"x": "BTD", "b": "BT1N", "c": "BTDN", "g": "BTDN", "state": "BDN"}
    ),
    "diagonal, complex": (
        diagonal,
        {"x": "BTD", "b": "DN2", "c": "BTDN2", "g": "DN", "theta": "DN", "state": "BDN2"},
    ),
    "conv": (short_convolution, {"x": "BTC", "weight": "CW", "bias": "C", "state": "BCL"}),
    "rnn": (partial(rnn, activation="tanh"), {"u": "BTD", "weight": "D", "state": "BD"}),
    "rnn, full": (partial(rnn, activation="tanh"), {"u": "BTD", "weight": "DD", "state": "BD"}),
    "running_max": (running_max, {"x": "BTC", "g": "BTC", "state": "BC"}),
}  # fmt: skip
PACKED = [case for case in CALLS if not case.startswith("r")]
LEADERS = ("v", "x", "u")


def precise(case: str) -> list[str]:
    """What is never bfloat16."""
    return ["state", "g", "theta", "normalizer", *(["x"] if case == "running_max" else [])]


def inputs(case: str, **sizes: int) -> Inputs:
    """Small ones of every layout, with the lengths of their rows."""
    found = {**SIZES, "1": 1, "2": 2, **sizes}
    made: Inputs = {
        name: -torch.rand([found[letter] for letter in layout])
        for name, layout in CALLS[case][1].items()
    }
    made["lengths"] = torch.full((found["B"],), found["T"])
    return made | ({"theta": None} if case in ("diagonal", "diagonal, selective") else {})


def refused(case: str, made: Inputs, name: str) -> str:
    """The one line that says why; it begins with the name of the tensor."""
    with pytest.raises(ValueError, match="need") as error:
        CALLS[case][0](**made)
    text = str(error.value)
    assert "\n" not in text and len(text) < 160
    assert name == "any" or text.split()[0] in (name, "k" if name == "q" else name), text
    return text


@pytest.mark.parametrize("case", CALLS)
def test_every_axis_of_every_tensor(case: str) -> None:
    """One longer, 1 instead, none or one more; what broadcasts or pads would be silently wrong."""
    made = inputs(case)
    CALLS[case][0](**made)
    for name, x in made.items():
        if x is None:
            continue
        layout = CALLS[case][1].get(name, "B")
        for axis, letter in enumerate(layout):
            if letter == "T" and case in ("diagonal", "conv", "rnn", "rnn, full"):
                continue  # the only one with this axis
            for size in {x.shape[axis] + 1, *([1] if letter not in "1D" else [])}:
                other = [*x.shape]
                other[axis] = size
                leads = name in LEADERS or letter in "WN" or layout == "DD"
                refused(case, made | {name: x.new_zeros(other)}, "any" if leads else name)
        for wrong in (x[None], x.new_zeros(()), *([] if layout == "DD" else [x[0]])):
            refused(case, made | {name: wrong}, name)


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("letter", "BT")
def test_nothing_at_all(case: str, letter: str) -> None:
    name = next(name for name in LEADERS if name in CALLS[case][1])
    text = refused(case, inputs(case, **{letter: 0}), name)
    assert "at least 1 of each" in text


@pytest.mark.parametrize("case", CALLS)
def test_dtypes(case: str) -> None:
    made = inputs(case)
    for name, x in made.items():
        if x is None or name == "lengths":
            continue
        wrong = [torch.float16, torch.int64, torch.bool, torch.complex64]
        for dtype in [*wrong, *([torch.bfloat16] if name in precise(case) else [])]:
            assert str(dtype) in refused(case, made | {name: x.to(dtype)}, name)
        right = [torch.float64, *([] if name in precise(case) else [torch.bfloat16])]
        for dtype in right:
            CALLS[case][0](**made | {name: x.to(dtype)})
    refused(case, made | {"lengths": torch.ones(2)}, "lengths")


@pytest.mark.parametrize("case", CALLS)
def test_devices(case: str) -> None:
    made = inputs(case)
    for name, x in made.items():
        if x is not None and name not in LEADERS:
            text = refused(case, made | {name: x.to("meta")}, name)
            assert text.startswith(f"{name} is on meta, need cpu, where ")


@pytest.mark.parametrize("case", PACKED)
def test_packed(case: str) -> None:
    """States then have as many rows as there are sequences, every other row is one."""
    two, one = inputs(case), inputs(case, B=1)
    made = one | {name: two[name] for name in ("state", "normalizer") if name in two}
    made |= {"lengths": None, "cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32)}
    CALLS[case][0](**made)
    for name in ("state", "normalizer"):
        x = made.get(name)
        if x is not None:
            text = refused(case, made | {name: torch.cat([x, x])}, "any")
            assert "sequences" in text, text
    leader = "v" if "v" in CALLS[case][1] else "x"
    refused(case, made | {leader: two[leader]}, "any")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_dtypes_without_kernels(dtype: torch.dtype) -> None:
    """What a call on a GPU would say."""
    fact = ("v", torch.Size([2, 9, 4, 6]), dtype, torch.device("cuda:0"))
    with pytest.raises(ValueError, match=rf"v is {dtype} on cuda, need one of .*32, .*bfloat16$"):
        Arguments((), v="BTHV")._verify(True, (fact,))


def test_heads_that_do_not_divide() -> None:
    made = inputs("delta", G=3)
    assert "H = 4 heads, need a multiple of G = 3" in refused("delta", made, "v")


def test_a_state_of_float64_is_computed_in_float64() -> None:
    """Whatever the dtype of the rest; the outputs have that of the values."""
    for case in PACKED[:-1]:  # a convolution keeps inputs, which it does not compute
        made = inputs(case)
        exact = {n: x.double() if x is not None and n != "lengths" else x for n, x in made.items()}
        whole = {name: exact[name] for name in precise(case) if made.get(name) is not None}
        o, state, *_ = CALLS[case][0](**made | whole)
        wanted = CALLS[case][0](**exact)[1]
        assert (o.dtype, state.dtype) == (torch.float32, torch.float64)
        assert float((state - wanted).abs().max()) < 1e-12, case
