"""Rows of different lengths in one call: each equals its float64 loop alone, for every mixer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from export_models import session
from loops import CASES
from loops.common import HIDDEN
from test_mixers import (
    as_float32,
    build,
    filled_state,
    loop_in_place,
    numbers,
    one_layer,
    shared,
    truth,
)
from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.step_form import step_form
from edgelin.export.trace import trace

GROWING = {
    case
    for case, table in CASES.items()
    if 0 in (table.get("window"), table.get("attention", {}).get("window"))
}
FIXED = [case for case in CASES if case not in GROWING]
POSITIONS = torch.tensor([3, 0, 1_000_000, 70])
# What tests/export/test_streams.py has not: other recurrences, and states of other kinds.
EXPORTED = [
    "attention, window 80, 5 sinks",
    "kda",
    "lti, dense",
    "mamba",
    "rwkv4",
    "rwkv6",
    "rwkv7",
    "rnn",
]


def _call(mixer: torch.nn.Module, x: Tensor, state: dict[str, Tensor], lengths: Tensor) -> tuple:
    return mixer(x, state, POSITIONS, *shared(mixer, x), lengths=lengths)


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.parametrize(
    "time, lengths", [(1, [0, 1, 1, 0]), (65, [0, 1, 64, 65]), (130, [5, 0, 66, 130])]
)
def test_every_row_is_its_own_loop(case: str, time: int, lengths: list[int]) -> None:
    mixer = build(case)
    x, state = numbers(4, time, HIDDEN, seed=2), filled_state(mixer, 4)
    single = _call(mixer, x.float(), as_float32(state), torch.tensor(lengths))
    double = _call(mixer.double(), x, state, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        at = slice(row, row + 1)
        own = {name: tensor[at] for name, tensor in state.items()}
        if length == 0:
            for name, tensor in own.items():
                assert torch.equal(single[1][name][at], tensor.float())
                assert torch.equal(double[1][name][at], tensor)
            continue
        expected = truth(case, x[at, :length], own, POSITIONS[at])
        for found, tolerance in ((single, 2e-5), (double, 1e-9)):
            got = {"y": found[0][at, :length], **{n: t[at] for n, t in found[1].items()}}
            for name, array in {"y": expected[0], **expected[1]}.items():
                error = np.abs(got[name].detach().numpy() - array).max()
                assert error <= tolerance * np.abs(array).max(), (name, row)


@pytest.mark.parametrize("case", FIXED)
def test_what_stands_behind_an_end_changes_no_bit(case: str) -> None:
    mixer = build(case)
    state, lengths = as_float32(filled_state(mixer, 4)), torch.tensor([0, 1, 40, 70])
    x = numbers(4, 70, HIDDEN, seed=2).float()
    other = x.clone()
    for row, length in enumerate(lengths):
        other[row, length:] = 30 * numbers(70 - int(length), HIDDEN, seed=5 + row).float()
    (y, after), (y_other, after_other) = (_call(mixer, a, state, lengths) for a in (x, other))
    for row, length in enumerate(lengths):
        assert torch.equal(y[row, :length], y_other[row, :length])
    for name, tensor in after.items():
        assert torch.equal(tensor, after_other[name]), name


@pytest.mark.parametrize("case", sorted(GROWING))
def test_a_state_that_grows_has_one_length(case: str) -> None:
    mixer = build(case)
    with pytest.raises(EdgelinError, match=r"need states of fixed size.*; give it a window"):
        _call(mixer, numbers(4, 2, HIDDEN).float(), as_float32(filled_state(mixer, 4)), POSITIONS)


@pytest.mark.parametrize("case", EXPORTED)
def test_packed_sequences_are_their_own_loops(case: str) -> None:
    """A model whose one row holds them all; two groups, one of them padded, and an empty one."""
    model = one_layer(case)
    mixer, lengths = model.blocks[0].mixer, [40, 0, 1, 130, 41]
    ids = torch.randint(0, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(4))
    state = filled_state(mixer, len(lengths))
    if any(spec.name == "position" for spec in model.state_specs()):
        state["position"] = torch.tensor([3, 0, 1_000_000, 70, 0])
    exact = loop_in_place(model, mixer, mixer, case)
    ends = torch.tensor([0, *np.cumsum(lengths)])
    logits, after = model.double()(ids, state, cu_seqlens=ends)
    for row, length in enumerate(lengths):
        own = {name: t[row : row + 1] for name, t in state.items()}
        start = int(ends[row])
        wanted = own
        if length:
            part, wanted = exact(ids[:, start : start + length], own)
            torch.testing.assert_close(logits[:, start : start + length], part)
        for name, tensor in wanted.items():
            torch.testing.assert_close(after[name][row : row + 1], tensor)


@pytest.mark.parametrize("case", EXPORTED)
def test_rows_of_a_graph_are_their_own_loops(case: str) -> None:
    model = one_layer(case)
    mixer = model.blocks[0].mixer
    exported = step_form(model).blocks[0].mixer
    specs, lengths = model.state_specs(), [0, 1, 40, 64]
    ids = torch.randint(0, 50, (4, 64), generator=torch.Generator().manual_seed(4))
    state = filled_state(exported, 4)
    if any(spec.name == "position" for spec in specs):
        state["position"] = POSITIONS
    traced = trace(model, lengths=True)
    exact = loop_in_place(model, mixer, exported, case)
    alone = [
        exact(ids[i : i + 1, :n], {name: t[i : i + 1] for name, t in state.items()})
        for i, n in enumerate(lengths)
        if n
    ]
    feeds = {s.input_name: state[s.name].numpy().astype(s.dtype) for s in specs}
    feeds |= {"input_ids": ids.numpy(), "lengths": np.array(lengths)}
    for profile in ("fused", "plain"):
        graph = traced.clone()
        passes.lower(graph, PROFILES[profile])
        passes.finish(graph, PROFILES[profile])
        logits, *after = session(graph).run(None, {**feeds, "num_logits_to_keep": np.array(0)})
        for spec, array in zip(specs, after, strict=True):
            assert array[0].tobytes() == feeds[spec.input_name][0].tobytes(), spec.name
        for i, (wanted, states) in enumerate(alone, start=1):
            pairs = [(logits[i, : lengths[i]], wanted[0])]
            pairs += [(a[i], states[s.name][0]) for s, a in zip(specs, after, strict=True)]
            for got, tensor in pairs:
                error = np.abs(got - tensor.numpy()).max()
                assert error <= 1e-4 * tensor.abs().max(), i
