"""Claims that hold for every mixer, each against its float64 numpy loop in ``loops/``."""

from __future__ import annotations

import copy
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch
from export_models import session
from loops import CASES, LOOPS
from loops.common import EPS, HIDDEN, LAYER
from loops.shared_block import embedding_of
from torch import Tensor, nn

from edgelin import layers, mixers
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.step_form import step_form
from edgelin.export.trace import trace
from edgelin.model import SequenceModel
from edgelin.recurrences import CHUNK

OWN_TESTS = {"ssm"}  # tests/mixers/test_ssm.py makes the same claims with its own loop
UNEXPORTED = {"attention, window 7", "attention, window 7, 4 sinks"}
STATELESS = {case for case in CASES if case.startswith(("mlp", "moe"))}  # a model needs some state
PIECES = (1, 7, 63, 64, 1)
PAST = 9  # tokens in a cache that grows


def build(case: str, layer: int = LAYER) -> Any:
    """A mixer with reproducible weights, those of norms off their neutral values."""
    torch.manual_seed(7)
    mixer = mixers.build(CASES[case], HIDDEN, layer, EPS, where="model.mixers.m")
    for name, parameter in mixer.named_parameters():
        if "norm" in name:  # ones and zeros would hide which of two norms was taken
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return mixer


def call(mixer: Any, x: Tensor, state: dict[str, Tensor], position: Tensor) -> Any:
    """The mixer as the only one of a model."""
    return mixer(x, state, position, *shared(mixer, x))


def shared(mixer: Any, x: Tensor) -> tuple[dict[str, Tensor], ...]:
    """What layers of a model share, for a mixer that asks for it."""
    return ({"embedding": embedding_of(x)},) if getattr(mixer, "shares", False) else ()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal float64 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled_state(mixer: Any, batch: int) -> dict[str, Tensor]:
    """A state that is not zero, float64; a normaliser is positive."""
    shapes = {s.name: s.sized(PAST) for s in mixer.state_specs()}
    state = {name: 0.3 * numbers(batch, *shape, seed=1) for name, shape in shapes.items()}
    return {k: v.abs() + 1 if k.startswith("normalizer") else v for k, v in state.items()}


def as_float32(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state as a model carries it."""
    return {name: tensor.float() for name, tensor in state.items()}


def in_pieces(
    mixer: nn.Module, x: Tensor, state: dict[str, Tensor], position: Tensor, cuts: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run piece by piece with the state carried over."""
    outputs = []
    for piece in x.split(cuts, dim=1):
        y, state = call(mixer, piece, state, position)
        position = position + piece.shape[1]
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def truth(case: str, x: Tensor, state: dict[str, Tensor], position: Tensor) -> Any:
    """The loop's outputs and state for a case."""
    arrays = {name: tensor.double().numpy() for name, tensor in state.items()}
    return LOOPS[CASES[case]["type"]].loop(build(case), x.numpy(), arrays, position.numpy())


def check(got: tuple[Tensor, dict[str, Tensor]], expected: Any, tolerance: float) -> None:
    """Outputs and every state agree, relative to the largest entry."""
    np.testing.assert_allclose(
        got[0].detach(), expected[0], rtol=0, atol=tolerance * np.abs(expected[0]).max()
    )
    assert set(got[1]) == set(expected[1])
    for name, array in expected[1].items():
        np.testing.assert_allclose(
            got[1][name].detach(), array, rtol=0, atol=tolerance * np.abs(array).max()
        )


# --- the claims ----------------------------------------------------------------------------------


def test_every_mixer_has_a_case() -> None:
    names = {m.name for m in pkgutil.iter_modules(mixers.__path__)}
    assert {table["type"] for table in CASES.values()} | OWN_TESTS == names


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch, time", [(1, 1), (3, 63), (1, 64), (3, 65), (1, 130)])
def test_one_call_is_the_loop(case: str, batch: int, time: int) -> None:
    mixer = build(case)
    x, state = numbers(batch, time, HIDDEN, seed=2), filled_state(mixer, batch)
    position = torch.tensor([0, 3, 1_000_000][-batch:])
    expected = truth(case, x, state, position)
    check(call(mixer, x.float(), as_float32(state), position), expected, 2e-5)
    check(call(mixer.double(), x, state, position), expected, 1e-9)


@pytest.mark.parametrize("case", CASES)
def test_products_as_on_a_gpu_are_the_loop(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_is_on_gpu", lambda x: True)
    mixer = build(case)
    x, state = numbers(3, 65, HIDDEN, seed=2), filled_state(mixer, 3)
    position = torch.tensor([0, 3, 1_000_000])
    check(call(mixer.double(), x, state, position), truth(case, x, state, position), 1e-9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cuts", [[1] * 130, [5, 64, 1, 60], [65, 65], [1, 129]], ids=str)
def test_pieces_are_the_loop(case: str, cuts: list[int]) -> None:
    mixer = build(case)
    x, state = numbers(2, 130, HIDDEN, seed=3), filled_state(mixer, 2)
    position = torch.tensor([4030, 150])
    expected = truth(case, x, state, position)
    check(in_pieces(mixer, x.float(), as_float32(state), position, cuts), expected, 2e-5)


@pytest.mark.parametrize("case", CASES)
def test_an_output_depends_on_no_later_token(case: str) -> None:
    mixer = build(case)
    x, position = numbers(1, 130, HIDDEN).float(), torch.tensor([0])
    state = as_float32(filled_state(mixer, 1))
    changed = x.clone()
    changed[:, 70:] += 1
    before, after = (call(mixer, a, state, position)[0] for a in (x, changed))
    torch.testing.assert_close(before[:, :70], after[:, :70], rtol=0, atol=1e-6)
    assert (before[:, 70:] - after[:, 70:]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_states_are_results_not_changed_arguments(case: str) -> None:
    mixer = build(case)
    state, position = as_float32(filled_state(mixer, 2)), torch.tensor([4, 4])
    copies = {name: tensor.clone() for name, tensor in state.items()}
    for time in (1, 65):
        _, after = call(mixer, numbers(2, time, HIDDEN).float(), state, position)
        assert list(after) == [spec.name for spec in mixer.state_specs()]
        for name, tensor in state.items():
            assert torch.equal(tensor, copies[name])
            assert after[name].dtype == torch.float32
        for spec in mixer.state_specs():
            assert after[spec.name].shape[1:] == spec.sized(PAST + time)
    assert position.tolist() == [4, 4]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_and_state_gets_a_gradient(case: str) -> None:
    mixer = build(case)
    state = {k: v.requires_grad_() for k, v in as_float32(filled_state(mixer, 2)).items()}
    y, after = call(mixer, numbers(2, 70, HIDDEN).float(), state, torch.tensor([50, 50]))
    (y.square().sum() + sum(s.sum() for s in after.values())).backward()
    for name, tensor in [*mixer.named_parameters(), *state.items()]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all() and tensor.grad.abs().max() > 0, name


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_autocast_stays_near_float32(case: str) -> None:
    mixer = build(case)
    x, position = numbers(2, 70, HIDDEN).float(), torch.tensor([0, 9])
    state = as_float32(filled_state(mixer, 2))
    y, after = call(mixer, x, state, position)
    with torch.autocast("cpu", torch.bfloat16):
        low, low_after = call(mixer, x, state, position)
    assert (low.float() - y).abs().max() < 0.05 * y.abs().max()
    assert all(tensor.dtype == torch.float32 for tensor in low_after.values())
    for name, tensor in after.items():
        assert (low_after[name] - tensor).abs().max() < 0.05 * tensor.abs().max(), name


@pytest.mark.parametrize("case", [c for c in CASES if c not in UNEXPORTED])
def test_traces_with_dynamic_batch_and_time(case: str) -> None:
    mixer = build(case)
    batch, time = torch.export.Dim("batch", max=64), torch.export.Dim("time", min=1, max=CHUNK)
    state = as_float32(filled_state(mixer, 2))
    past = torch.export.Dim("past", min=0)
    sizes = {
        s.name: {0: batch} | ({s.growing_axis: past} if s.growing_axis else {})
        for s in mixer.state_specs()
    }
    program = torch.export.export(
        _Alone(mixer),
        (numbers(2, 3, HIDDEN).float(), state, torch.tensor([0, 0])),
        dynamic_shapes=({0: batch, 1: time}, sizes, {0: batch}),
    ).module()
    for rows, tokens in [(1, 1), (3, 64), (2, 7)]:
        x = numbers(rows, tokens, HIDDEN, seed=5)
        position = torch.arange(rows) * 99
        state = filled_state(mixer, rows)
        expected = truth(case, x, state, position)
        check(program(x.float(), as_float32(state), position), expected, 2e-5)


class _Alone(nn.Module):
    """A mixer without the argument that layers of a model share."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor, state: dict[str, Tensor], position: Tensor) -> Any:
        """Run the mixer."""
        return call(self.mixer, x, state, position)


class _Loop(nn.Module):
    """A loop in the place of the mixer of layer 0."""

    def __init__(self, mixer: Any, exported: Any, case: str) -> None:
        super().__init__()
        self.inner, self.loop = mixer, LOOPS[CASES[case]["type"]].loop
        self.needs_position = getattr(mixer, "needs_position", False)
        self.state_specs = exported.state_specs
        self.shares = CASES[case]["type"] == "shared_block"

    def forward(self, x: Tensor, state: dict[str, Tensor], position: Tensor, *shared: Any) -> Any:
        """Run the loop, which knows the states of layer 3."""
        arrays = {name.replace(".0", f".{LAYER}"): t.numpy() for name, t in state.items()}
        extra = [tensors["embedding"].numpy() for tensors in shared]
        y, after = self.loop(self.inner, x.numpy(), arrays, position.numpy(), *extra)
        named = {name.replace(f".{LAYER}", ".0"): torch.from_numpy(a) for name, a in after.items()}
        return torch.from_numpy(y), named


@pytest.mark.parametrize("case", [c for c in CASES if c not in UNEXPORTED | STATELESS])
def test_exported_graphs_are_the_loop(case: str) -> None:
    """Tokens in, logits and states out, both forms, in pieces of 1 to 64 tokens."""
    model = one_layer(case)
    mixer = model.blocks[0].mixer
    exported: Any = step_form(model).blocks[0].mixer
    specs = model.state_specs()
    ids = torch.randint(0, 50, (2, sum(PIECES)), generator=torch.Generator().manual_seed(4))
    state = filled_state(exported, 2)
    if any(spec.name == "position" for spec in specs):
        state["position"] = torch.tensor([4030, 70])
    traced = trace(model)
    exact = loop_in_place(model, mixer, exported, case)
    wanted, states = (a for a in exact(ids, state))
    for profile in ("fused", "plain"):
        graph = traced.clone()
        passes.lower(graph, PROFILES[profile])
        passes.finish(graph, PROFILES[profile])
        runner, logits, start = session(graph), [], 0
        now = {s.name: state[s.name].numpy().astype(s.dtype) for s in specs}
        for length in PIECES:
            feeds = {s.input_name: now[s.name] for s in specs}
            feeds["input_ids"] = ids[:, start : start + length].numpy()
            piece, *after = runner.run(None, {**feeds, "num_logits_to_keep": np.array(0)})
            logits.append(torch.from_numpy(piece))
            now = {spec.name: array for spec, array in zip(specs, after, strict=True)}
            start += length
        got = torch.cat(logits, 1), {name: torch.from_numpy(a) for name, a in now.items()}
        check(got, (wanted.numpy(), {name: t.numpy() for name, t in states.items()}), 1e-4)


def loop_in_place(model: SequenceModel, mixer: Any, exported: Any, case: str) -> SequenceModel:
    """The model in float64 with the loop of a case for its layer; a trace shares its weights."""
    exact = copy.deepcopy(model).double()
    exact.blocks[0].mixer = _Loop(mixer, exported, case)
    return exact


def one_layer(case: str) -> SequenceModel:
    """A model whose stream is mostly what the mixer makes of it."""
    config = ModelConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=8,
        layers=("m",),
        mixers={"m": CASES[case]},
        rms_norm_eps=EPS,
    )
    model = SequenceModel(config).eval().requires_grad_(False)
    model.blocks[0].mixer = build(case, 0).requires_grad_(False)
    model.embedding.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", ["equal", "zero", "large"])
def test_hard_inputs_are_the_loop(case: str, tokens: str) -> None:
    mixer = build(case)
    x = {
        "equal": numbers(1, 1, HIDDEN, seed=6).expand(3, 130, HIDDEN),
        "zero": torch.zeros(3, 130, HIDDEN, dtype=torch.float64),
        "large": 4 * numbers(3, 130, HIDDEN, seed=6),
    }[tokens]
    state = {name: torch.zeros_like(t) for name, t in filled_state(mixer, 3).items()}
    position = torch.tensor([0, 0, 0])
    expected = truth(case, x, state, position)
    check(call(mixer, x.float(), as_float32(state), position), expected, 2e-4)
    check(call(mixer.double(), x, state, position), expected, 1e-8)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_differences(case: str) -> None:
    """Along one direction through input, states and parameters, in float64, over a chunk border."""
    mixer, position = build(case).double(), torch.tensor([70])
    given = {"x": numbers(1, 66, HIDDEN, seed=8), **filled_state(mixer, 1)}
    given |= {name: p.detach() for name, p in mixer.named_parameters()}
    along = {name: numbers(*t.shape, seed=9) for name, t in given.items()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        states = {s.name: values[s.name] for s in mixer.state_specs()}
        own = {name: values[name] for name, _ in mixer.named_parameters()}
        arguments = (values["x"], states, position, *shared(mixer, values["x"]))
        y, after = torch.func.functional_call(mixer, own, arguments)
        parts = [y, *after.values()]
        weighted = [(p * numbers(*p.shape, seed=10 + i)).sum() for i, p in enumerate(parts)]
        return torch.stack(weighted).sum()

    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    grads = torch.autograd.grad(loss(leaves), list(leaves.values()))
    slope = sum((g * along[name]).sum() for name, g in zip(leaves, grads, strict=True))
    step = 1e-5
    ahead, back = (
        loss({name: t + sign * step * along[name] for name, t in given.items()}) for sign in (1, -1)
    )
    torch.testing.assert_close(slope, (ahead - back) / (2 * step), rtol=1e-5, atol=1e-6)


# --- special to one mixer ------------------------------------------------------------------------


def test_attention_refuses_to_trace_a_window_below_a_chunk() -> None:
    mixer = build("attention, window 7")
    state = as_float32(filled_state(mixer, 1))
    with pytest.raises(EdgelinError, match=r"window of 7 can't be exported.*64 or more"):
        torch.export.export(mixer, (numbers(1, 3, HIDDEN).float(), state, torch.tensor([0])))


def test_attention_ignores_slots_that_no_token_has_written() -> None:
    mixer = build("attention, window 64")
    x, position = numbers(1, 90, HIDDEN).float(), torch.tensor([0])
    empty = {name: torch.zeros_like(t) for name, t in filled_state(mixer, 1).items()}
    junk = {name: torch.full_like(t, 7.0) for name, t in empty.items()}
    for cuts in ([90], [30, 60]):
        y = [in_pieces(mixer, x, as_float32(s), position, cuts)[0] for s in (empty, junk)]
        torch.testing.assert_close(*y, rtol=0, atol=0)


@pytest.mark.parametrize(
    "case, change, message",
    [
        ("attention, window 7", {"num_kv_heads": 3}, "num_heads is 4, no multiple of .* = 3"),
        ("attention, window 7", {"head_dim": 5}, "head_dim is 5; rotary position needs an even"),
        ("attention, window 7", {"window": -1}, "window is -1; give at least 0"),
        ("attention, all tokens", {"sinks": 2}, "sinks is 2 without a window"),
        (
            "attention, all tokens",
            {"rotary_dim": 3},
            "rotary_dim is 3; give an even .* head_dim = 6",
        ),
        ("attention, all tokens", {"rotary_dim": 8}, "rotary_dim is 8; give an even"),
        ("retention", {"key_dim": 5}, "key_dim is 5; rotary position needs an even"),
        ("gated_deltanet", {"conv_size": 1}, "conv_size is 1; give at least 2"),
        ("gla", {"decay_rank": 0}, "decay_rank is 0; give at least 1"),
        ("linear_attention", {"num_heads": 0}, "num_heads is 0; give at least 1"),
        ("gla", {"heads": 2}, "model.mixers.m has an unknown key 'heads'"),
    ],
)
def test_wrong_sizes_are_refused(case: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        mixers.build({**CASES[case], **change}, HIDDEN, 0, EPS, where="model.mixers.m")


def test_unknown_and_missing_types_are_refused() -> None:
    with pytest.raises(EdgelinError, match=r"'gdn' is not known; use one of .*gated_deltanet"):
        mixers.load("gdn")
    with pytest.raises(EdgelinError, match=r"'no\.such\.module' is not known"):
        mixers.load("no.such.module")
    with pytest.raises(EdgelinError, match=r"model\.mixers\.m lacks the key 'type'"):
        mixers.build({}, HIDDEN, 0, EPS, where="model.mixers.m")
