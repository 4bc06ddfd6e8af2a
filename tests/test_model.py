"""The model: states, pieces, head, initial weights, compilation, and the examples."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from edgelin.config import ModelConfig, from_dict, load_run, to_dict
from edgelin.errors import EdgelinError
from edgelin.layers import RMSNorm, l2_norm, rotary_angles, rotate
from edgelin.model import SequenceModel, check_size
from edgelin.recurrences import CHUNK

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").rglob("*.toml"))
HEADS = {"num_heads": 2, "key_dim": 4, "value_dim": 6}
MIXERS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear_attention", **HEADS},
    "ret": {"type": "retention", **HEADS},
    "gla": {"type": "gla", **HEADS},
    "gdn": {"type": "gated_deltanet", **HEADS},
    "delta": {"type": "deltanet", **HEADS},
    "ssm": {"type": "ssm", "inner_size": 12, "state_size": 4},
    "local": {"type": "attention", "num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "window": 64},
}
CONFIG = ModelConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, layers=tuple(MIXERS), mixers=MIXERS
)


def build(**changes: Any) -> SequenceModel:
    """A small model of all mixers, with weights large enough to matter."""
    torch.manual_seed(3)
    model = SequenceModel(dataclasses.replace(CONFIG, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return model


def tokens(batch: int, time: int) -> Tensor:
    return torch.randint(50, (batch, time), generator=torch.Generator().manual_seed(time))


def in_pieces(model: SequenceModel, ids: Tensor, cuts: list[int]) -> tuple[Tensor, Any]:
    """Logits and final state, piece by piece."""
    state, outputs = None, []
    for piece in ids.split(cuts, dim=1):
        logits, state = model(piece, state)
        outputs.append(logits)
    return torch.cat(outputs, dim=1), state


def largest_difference(a: Any, b: Any) -> float:
    """Over logits and all states."""
    pairs = [(a[0], b[0]), *((a[1][name], b[1][name]) for name in b[1])]
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("batch, cuts", [(3, [1] * 66), (1, [64, 1, 65]), (3, [7, 63, 60])])
def test_pieces_are_the_float64_steps(batch: int, cuts: list[int]) -> None:
    ids = tokens(batch, sum(cuts))
    single, wide = build(), build().double()
    with torch.no_grad():
        expected = in_pieces(wide, ids, [1] * ids.shape[1])
        assert largest_difference(wide(ids), expected) < 1e-10
        assert largest_difference(in_pieces(single, ids, cuts), expected) < 5e-5
        assert largest_difference(single(ids), expected) < 5e-5
    assert expected[1]["position"].tolist() == [ids.shape[1]] * batch


def test_packed_sequences_train_as_rows_of_their_own() -> None:
    """Loss, gradients of all weights, and states that come after, of each sequence in turn."""
    model, lengths = build().double(), [5, 0, 70, 6]
    ids, ends = tokens(1, sum(lengths)), torch.tensor([0, 5, 5, 75, 81], dtype=torch.int32)
    logits, after = model(ids, cu_seqlens=ends)
    target = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).double()
    found = torch.autograd.grad((logits * target).sum(), list(model.parameters()))
    loss = torch.zeros(())
    for row, part in enumerate(ids.split(lengths, dim=1)):
        at = slice(int(ends[row]), int(ends[row + 1]))
        if part.shape[1]:
            alone, state = in_pieces(model, part, [1] * part.shape[1])
            loss = loss + (alone * target[:, at]).sum()
        else:
            state = model.initial_state(1)
        for name, tensor in state.items():
            torch.testing.assert_close(after[name][row : row + 1], tensor)
    for one, other in zip(found, torch.autograd.grad(loss, model.parameters()), strict=True):
        torch.testing.assert_close(one, other)
    assert after["position"].tolist() == lengths


def test_packed_sequences_need_states_of_one_size() -> None:
    model = build(mixers=MIXERS | {"local": MIXERS["local"] | {"window": 0}})
    with pytest.raises(EdgelinError, match=r"cu_seqlens needs states of fixed size; layer 6 at"):
        model(tokens(1, 9), cu_seqlens=torch.tensor([0, 4, 9]))
    with pytest.raises(ValueError, match="cu_seqlens and lengths are both given"):
        build()(tokens(1, 9), None, torch.tensor([9]), torch.tensor([0, 4, 9]))


def test_logits_depend_on_no_later_token() -> None:
    model, ids = build(), tokens(1, 130)
    changed = ids.clone()
    changed[:, 70:] = (changed[:, 70:] + 1) % 50
    with torch.no_grad():
        before, after = model(ids)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :70], after[:, :70], rtol=0, atol=1e-5)
    assert (before[:, 70:] - after[:, 70:]).abs().amax(-1).min() > 1e-3


def test_states_follow_their_description() -> None:
    model = build()
    specs = model.state_specs()
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    assert names[-1] == "position"
    assert [s.layer for s in specs[:-1]] == sorted(
        s.layer for s in specs[:-1] if s.layer is not None
    )
    initial = model.initial_state(3)
    _, after = model(tokens(3, 5), initial)
    for spec in specs:
        for state in (initial, after):
            assert state[spec.name].shape == (3, *spec.shape), spec
            assert str(state[spec.name].dtype) == f"torch.{spec.dtype}", spec
        assert (initial[spec.name] == spec.initial).all()
    assert list(after) == names


def test_position_is_a_state_only_where_a_mixer_needs_it() -> None:
    model = build(layers=("gdn", "linear"))
    assert "position" not in [spec.name for spec in model.state_specs()]
    assert "position" not in model(tokens(1, 3))[1]


def test_head_is_tied_or_its_own() -> None:
    tied, own = build(), build(tie_word_embeddings=False)
    assert own.num_parameters() - tied.num_parameters() == 50 * 16
    assert not any("head" in name for name in tied.state_dict())
    hidden, _ = own.hidden(tokens(1, 3))
    expected = hidden @ own.head.weight.T
    torch.testing.assert_close(own(tokens(1, 3))[0], expected)


def test_parameter_count() -> None:
    model = build(layers=("linear",))
    mixer = 16 * 2 * (4 + 4 + 6) + 2 * 6 * 16
    assert model.num_parameters() == 50 * 16 + 3 * 16 + mixer + 3 * 16 * 24


def test_initial_weights_shrink_residual_projections_with_depth() -> None:
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, hidden_size=128, layers=("gdn",) * 8)
    model = SequenceModel(config)
    block: Any = model.blocks[0]
    assert float(block.mlp.gate_up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    for projection in (block.mlp.down_proj, block.mixer.out_proj):
        assert float(projection.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.1)
    logits, _ = model(tokens(2, 64))
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens(2, 64)[:, 1:].flatten()
    )
    assert loss.item() == pytest.approx(math.log(50), rel=0.1)


def test_dropout_acts_in_training_only() -> None:
    model, ids = build(dropout=0.5), tokens(1, 9)
    torch.testing.assert_close(model(ids)[0], model(ids)[0], rtol=0, atol=0)
    model.train()
    assert (model(ids)[0] - model(ids)[0]).abs().max() > 0


def test_autocast_keeps_logits_stream_and_states_in_float32() -> None:
    model, ids = build(), tokens(2, 70)
    streams = []
    model.blocks[0].register_forward_hook(lambda *a: streams.append(a[2][0].dtype))
    expected, _ = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = model(ids)
    assert logits.dtype == torch.float32
    assert streams == [torch.float32] * 2
    assert {str(t.dtype) for t in state.values()} == {"torch.float32", "torch.int64"}
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("layers, time", [(("ret", "gdn", "local"), 70), (("gla", "local"), 1)])
def test_compiles_to_one_graph_with_its_backward(layers: tuple[str, ...], time: int) -> None:
    model, ids = build(layers=layers), tokens(2, time)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for forward in (model, compiled):
        model.zero_grad()
        forward(ids)[0].square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for eager, fused in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-3, atol=1e-5)


def test_traces_with_dynamic_batch_and_time() -> None:
    model = build()
    batch, time = torch.export.Dim("batch", max=64), torch.export.Dim("time", min=1, max=CHUNK)
    state = model.initial_state(2)
    program = torch.export.export(
        model,
        (tokens(2, 3), state),
        dynamic_shapes=({0: batch, 1: time}, {name: {0: batch} for name in state}),
    )
    marks = [n for n in program.graph.nodes if n.target is torch.ops.edgelin.keep_last.default]
    assert len(marks) == 1
    with torch.no_grad():
        for rows, length in [(1, 1), (3, 64), (2, 7)]:
            _, before = model(tokens(rows, 20))
            got = program.module()(tokens(rows, length), before)
            assert largest_difference(got, model(tokens(rows, length), before)) < 1e-5


def test_a_mixer_may_live_in_any_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mine.py").write_text("from edgelin.mixers.gla import Config, Mixer\n")
    monkeypatch.syspath_prepend(tmp_path)
    mixers = {"m": {"type": "elsewhere.mine", **HEADS}}
    model = build(layers=("m",), mixers=mixers)
    assert [spec.name for spec in model.state_specs()] == ["recurrent.0"]


def test_wrong_mixer_tables_name_their_place() -> None:
    with pytest.raises(EdgelinError, match=r"model\.mixers\.m lacks the key 'type'"):
        build(layers=("m",), mixers={"m": {}})
    with pytest.raises(EdgelinError, match=r"model\.mixers\.m has an unknown key 'head'"):
        build(layers=("m",), mixers={"m": {"type": "gla", **HEADS, "head": 2}})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"type": "os.path"}, "mixer type 'os.path' is no mixer: the module needs a dataclass"),
        ({"type": "__init__"}, "mixer type '__init__' is no mixer"),
        ({"type": "gla", **HEADS, "head": 2}, "model.mixers.m has an unknown key 'head'"),
        ({"type": "gla", **HEADS, "key_dim": 0}, "key_dim is 0; give at least 1"),
        ({"type": "gla", **HEADS, "num_heads": 10**12}, "num_heads is 1000000000000; give at most"),
        ({"type": "gla", **HEADS, "decay_rank": 10**9}, "decay_rank is 1000000000; give at most"),
        ({"type": "gated_deltanet", **HEADS, "conv_size": 10**9}, "conv_size is 1000000000; give"),
        ({"type": "ssm", "inner_size": 10**9}, "inner_size is 1000000000; give at most 65536"),
        ({**MIXERS["local"], "window": 10**9}, "window is 1000000000; give at most 65536"),
        ({**MIXERS["local"], "rope_theta": 0.0}, "rope_theta is 0.0; it must be above 0"),
    ],
)
def test_wrong_mixers_are_refused_even_if_no_layer_names_them(
    table: dict[str, Any], message: str
) -> None:
    with pytest.raises(EdgelinError) as error:
        build(mixers={**MIXERS, "m": table})
    assert str(error.value).startswith(message)


def test_a_mixer_module_that_raises_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_mixers").mkdir()
    for name, text in {"bad": "1 / 0", "lacks": "import no_such_package"}.items():
        (tmp_path / "broken_mixers" / f"{name}.py").write_text(text, encoding="utf-8")
        with pytest.raises(EdgelinError, match=f"'broken_mixers.{name}' does not load: "):
            build(layers=("m",), mixers={"m": {"type": f"broken_mixers.{name}"}})


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 1 << 20, "hidden_size": 1 << 20},
        {"hidden_size": 1 << 20, "intermediate_size": 1 << 20},
        {"mixers": {**MIXERS, "gla": {"type": "gla", **dict.fromkeys(HEADS, 1 << 16)}}},
        {"mixers": {**MIXERS, "local": {**MIXERS["local"], "window": 65536, "head_dim": 65536}}},
    ],
)
def test_a_model_beyond_memory_is_refused(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # a replaced torch.empty does not follow torch.device("meta")
    _device_constructors.cache_clear()
    with pytest.raises(EdgelinError, match=r"^the model has .* parameters and state values, whic"):
        check_size(dataclasses.replace(CONFIG, **changes))


def test_memory_is_counted_exactly() -> None:
    for tied in (True, False):
        config = dataclasses.replace(CONFIG, layers=CONFIG.layers * 2, tie_word_embeddings=tied)
        model = SequenceModel(config)
        states = sum(math.prod(s.shape) for s in model.state_specs() if s.layer is not None)
        # the last norm and the position are left out
        need = 4 * (model.num_parameters() - config.hidden_size + states)
        check_size(config, memory=need)
        with pytest.raises(EdgelinError, match=r"lower model\.hidden_size"):
            check_size(config, memory=need - 1)


def test_l2_norm_and_rms_norm_are_their_equations() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    expected = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(l2_norm(x), expected)
    torch.testing.assert_close(l2_norm(x.float()), expected.float())
    norm = RMSNorm(8, 1e-5)
    torch.nn.init.normal_(norm.weight)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x), expected)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_rotation_stays_exact_after_a_thousand_million_tokens() -> None:
    x = torch.randn(1, 2, 1, 4)
    frequencies = torch.tensor([1.0, 0.37], dtype=torch.float64)
    position = 10**9
    angles = rotary_angles(torch.tensor([position]), 2, frequencies)
    y = rotate(x, angles[:, :, None])
    for t in range(2):
        for i, frequency in enumerate(frequencies.tolist()):
            angle = math.fmod((position + t) * frequency, 2 * math.pi)
            turned = complex(x[0, t, 0, i], x[0, t, 0, i + 2]) * complex(
                math.cos(angle), math.sin(angle)
            )
            got = complex(y[0, t, 0, i], y[0, t, 0, i + 2])
            assert abs(got - turned) < 1e-5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: str(p.relative_to(p.parents[1])))
def test_examples_are_valid(path: Path) -> None:
    config = load_run(path).model
    with torch.device("meta"):
        model = SequenceModel(config)
    assert model.state_specs()


def test_mlps_name_what_follows_each_mixer() -> None:
    """A mixer may follow a mixer, or nothing; all norms and the cap are applied."""
    names = ("gla", "gdn", "ssm")
    config = dataclasses.replace(
        CONFIG,
        intermediate_size=0,
        layers=names,
        mixers={name: MIXERS[name] for name in names},
        mlps=("ssm", "", "gla"),
        norm="layer",
        embedding_norm=True,
        logit_softcap=0.5,
    )
    torch.manual_seed(0)
    model = SequenceModel(config).eval().double()
    kinds = [[type(branch).__module__ for branch in block.branches()] for block in model.blocks]
    assert [[kind.rpartition(".")[2] for kind in pair] for pair in kinds] == [
        ["gla", "ssm"], ["gated_deltanet"], ["ssm", "gla"]
    ]  # fmt: skip
    ids = tokens(2, 70)
    logits, state = model(ids)
    assert set(state) == {spec.name for spec in model.state_specs()}

    x = model.embedding_norm(model.embedding(ids))
    after = model.initial_state(2)
    for block in model.blocks:
        norms = [block.mixer_norm, getattr(block, "mlp_norm", None)]
        for branch, norm in zip(block.branches(), norms, strict=False):
            own = {s.name: after[s.name] for s in branch.state_specs()}
            x = x + branch(norm(x), own, torch.zeros(2, dtype=torch.int64))[0]
    centred = x - x.mean(-1, keepdim=True)
    x = centred / (centred.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    wanted = 0.5 * torch.tanh(x @ model.embedding.weight.T / 0.5)
    torch.testing.assert_close(logits, wanted, rtol=1e-9, atol=1e-9)


def test_norms_stand_before_or_after_a_branch() -> None:
    """Every place in one model, with norms that are not neutral."""
    places = ("before", "after", "both", "stream")
    config = dataclasses.replace(CONFIG, layers=("gla",) * 4, norm_places=places)
    torch.manual_seed(0)
    model = SequenceModel(config).eval().double()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + torch.rand(parameter.shape, generator=generator).double()
    ids = tokens(2, 70)
    x, after = model.embedding(ids), model.initial_state(2)
    for block, place in zip(model.blocks, places, strict=True):
        for name in ("mixer", "mlp"):
            branch = getattr(block, name)
            own = {s.name: after[s.name] for s in branch.state_specs()}
            y = getattr(block, f"{name}_norm")(x) if place != "after" else x
            x = y if place == "stream" else x
            y = branch(y, own, torch.zeros(2, dtype=torch.int64))[0]
            x = x + (getattr(block, f"{name}_post_norm")(y) if place in ("after", "both") else y)
    wanted = model.norm(x) @ model.embedding.weight.T
    torch.testing.assert_close(model(ids)[0], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mlps": ["gla"]}, "model.mlps has 1 names for 7 layers"),
        ({"mlps": ["gla"] * 7}, "model.intermediate_size = 24 would not be used"),
        ({"mlps": ["nix"] * 7, "intermediate_size": 0}, "model.mlps names 'nix'"),
        ({"sides": ["gla"]}, "model.sides has 1 names for 7 layers"),
        ({"sides": ["nix"] * 7}, "model.sides names 'nix'"),
        ({"sides": ["gla"] * 7, "norm_places": ["stream"] * 7}, "model.norm_places has 'stream'"),
        ({"norm_places": ["both"]}, "model.norm_places has 1 words for 7 layers"),
        ({"norm_places": ["behind"] * 7}, "model.norm_places has 'behind'; allowed: before, after"),
        ({"norm": "batch"}, "model.norm is 'batch'; allowed: rms, layer"),
        ({"logit_softcap": -1.0}, "model.logit_softcap is -1.0; the least is 0"),
    ],
)
def test_wrong_branches_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        from_dict(ModelConfig, {**to_dict(CONFIG), **change})
