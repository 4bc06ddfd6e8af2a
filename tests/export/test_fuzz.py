"""Odd models and damaged checkpoints on the way to a bundle: right numbers, or one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_matrix import Traced, leave_activations_float, lowered, replay

from edgelin import checkpoint as checkpoints
from edgelin.config import ModelConfig, from_dict
from edgelin.errors import EdgelinError
from edgelin.export import bundle as bundles
from edgelin.export import golden
from edgelin.export.bundle import export_checkpoint
from edgelin.export.profiles import PROFILES
from edgelin.export.reference import reference
from edgelin.export.step_form import step_form
from edgelin.export.trace import trace
from edgelin.model import SequenceModel

# --- configs -------------------------------------------------------------------------------------

SIZES = st.integers(1, 70)
SMALL = st.integers(1, 5)
HEADS = {"num_heads": SMALL, "key_dim": st.integers(1, 40), "value_dim": st.integers(1, 40)}
MAPS = st.sampled_from(["elu", "relu", "favor", "taylor", "hedgehog", "identity", "product"])
MIXERS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "gated_deltanet": HEADS,
    "linear_attention": {
        "num_heads": SMALL, "key_dim": st.integers(1, 9), "value_dim": SIZES, "feature_map": MAPS,
        "normalize": st.sampled_from(["z", "rms"]), "compensated": st.booleans(),
    },
    "gla": HEADS,
    "retention": HEADS,
    "mamba": {"inner_size": SIZES, "state_size": st.integers(1, 17)},
    "mamba2": {
        "num_heads": SMALL, "head_dim": SMALL, "state_size": st.integers(1, 17),
        "num_groups": SMALL,
    },
    "ssm": {"inner_size": SIZES, "state_size": st.integers(1, 9)},
    "rwkv7": {**HEADS, "decay_rank": SMALL, "gate_rank": SMALL},
    "attention": {
        "num_heads": st.integers(1, 6), "num_kv_heads": st.integers(1, 6),
        "head_dim": st.integers(1, 18), "window": st.sampled_from([0, 64, 65, 77]),
        "sinks": st.integers(0, 5), "qk_norm": st.booleans(), "gate": st.booleans(),
    },
    "rg_lru": {"inner_size": SIZES, "num_blocks": SMALL},
    "min_gru": {"inner_size": SIZES},
    "short_conv": {"conv_size": st.integers(1, 6)},
    "deltanet": HEADS,
    "kda": {**HEADS, "conv_size": st.integers(1, 5)},
    "hgrn2": HEADS,
    "lightning_attention": HEADS,
    "ema_attention": {**HEADS, "feature_map": MAPS},
    "mlstm": {**HEADS, "bias": st.booleans()},
    "rwkv4": {"inner_size": SIZES},
    "rwkv6": {**HEADS, "mix_rank": SMALL, "decay_rank": SMALL},
    "rnn": {"inner_size": SIZES, "recurrence": st.sampled_from(["elementwise", "full"])},
    "lti": {
        "inner_size": st.integers(1, 20), "state_size": st.integers(1, 9),
        "export_form": st.sampled_from(["diagonal", "dense"]),
    },
    "channel_mix": {"intermediate_size": SIZES, "receptance": st.booleans()},
    "moe": {
        "num_experts": st.integers(1, 6), "experts_per_token": st.integers(1, 6),
        "intermediate_size": SIZES, "router": st.sampled_from(["softmax", "sigmoid"]),
        "shared_size": st.integers(0, 9), "gated": st.booleans(),
    },
}  # fmt: skip


@st.composite
def configs(draw: Callable[..., Any]) -> dict[str, Any]:
    """A ``model`` table: sizes that divide nothing, some that contradict each other."""
    types = draw(st.lists(st.sampled_from(sorted(MIXERS)), min_size=1, max_size=2, unique=True))
    return {
        "vocab_size": draw(st.integers(2, 200)),
        "hidden_size": draw(SIZES),
        "intermediate_size": draw(SIZES),
        "layers": types,
        "mixers": {
            name: {"type": name, **draw(st.fixed_dictionaries(MIXERS[name]))} for name in types
        },
        "tie_word_embeddings": draw(st.booleans()),
    }


def build(table: dict[str, Any]) -> SequenceModel | None:
    """The model of a table, off its neutral weights; None: it was refused in one line."""
    try:
        torch.manual_seed(0)
        model = SequenceModel(from_dict(ModelConfig, table, "model"))
    except EdgelinError as error:
        assert "\n" not in str(error) and 20 < len(str(error)) < 500
        return None
    model = model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@given(configs())
def test_a_model_is_refused_or_its_calls_are_its_steps(table: dict[str, Any]) -> None:
    model = build(table)
    assume(model is not None)
    assert model is not None
    model.double()
    ids = torch.randint(0, table["vocab_size"], (2, 70))
    if any(spec.growing_axis for spec in model.state_specs()):
        ids = ids[:, :9]
    whole, after = model(ids)
    state, steps = model.initial_state(2), []
    for t in range(ids.shape[1]):
        logits, state = model(ids[:, t : t + 1], state)
        steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-6, atol=1e-8)
    for name, tensor in after.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-8)


def export_tiny(table: dict[str, Any], profile: str, width: str) -> None:
    """Trace, lower, round and run; compare as the matrix of all mixers does."""
    model = build(table)
    if model is None:
        return
    try:
        model = step_form(model)
        found = Traced(model, trace(model), {"none": reference(model)}, {}, {})
        graph = lowered(found, profile, width)
    except EdgelinError as error:
        assert "\n" not in str(error) and 20 < len(str(error)) < 500
        return
    if width != "none":
        got = golden.compare(found.exact[width], replay(found, graph))
        noise = golden.compare(found.exact[width], found.noisy[width])
        assert got.finite and got.outputs < 1e-3 + 3 * noise.outputs
        leave_activations_float(graph)
    got = golden.compare(found.exact[width], replay(found, graph))
    assert got.finite and got.outputs < 1e-3 and (got.states or 0) < 1e-3


EXPORTS = given(
    configs(), st.sampled_from(sorted(PROFILES)), st.sampled_from(["none", "int8", "int4"])
)


@settings(max_examples=3)
@EXPORTS
def test_a_graph_is_refused_or_right(table: dict[str, Any], profile: str, width: str) -> None:
    export_tiny(table, profile, width)


@pytest.mark.full
@settings(max_examples=60)
@EXPORTS
def test_many_graphs_are_refused_or_right(table: dict[str, Any], profile: str, width: str) -> None:
    export_tiny(table, profile, width)


# --- checkpoints ---------------------------------------------------------------------------------


class _Reached(Exception):
    """The export got past all checks."""


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], Any]:
    """Exports up to the trace: the model that would be traced, or None and one line."""

    def stop(model: SequenceModel, **options: Any) -> Any:
        reached.append(model)
        raise _Reached

    reached: list[SequenceModel] = []
    monkeypatch.setattr(bundles, "trace", stop)

    def run(folder: Path) -> SequenceModel | None:
        try:
            export_checkpoint(folder, tmp_path / "out")
        except _Reached:
            return reached[-1]
        except EdgelinError as error:
            assert "\n" not in str(error) and 20 < len(str(error)) < 600
            return None
        finally:
            assert not (tmp_path / "out").exists()
            assert not [p for p in tmp_path.iterdir() if p.name.endswith(".part")]
        raise AssertionError("the trace was not reached, and nothing was refused")

    return run


DAMAGES = [
    "missing",
    "extra",
    "transposed",
    "nan",
    "inf",
    "half",
    "half a tensor",
    "integers",
    "bit",
]


@settings(max_examples=40)
@given(st.sampled_from(DAMAGES), st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
def test_a_damaged_checkpoint_is_refused_or_as_it_says(
    small_checkpoint: Path, exported: Any, tmp_path: Path, damage: str, which: int, place: float
) -> None:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    for path in small_checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    name = sorted(tensors)[which % len(tensors)]
    given, must_fail = tensors[name], True
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        tensors["blocks.9.x"] = given.clone()
    elif damage == "transposed":
        assume(given.ndim == 2 and given.shape[0] != given.shape[1])
        tensors[name] = given.T.contiguous()
    elif damage in ("nan", "inf"):
        tensors[name] = given.clone()
        tensors[name].view(-1)[int(place * given.numel())] = float(damage)
    elif damage == "half a tensor":
        tensors[name] = given[: len(given) // 2].clone()
    elif damage == "integers":
        tensors[name] = given.to(torch.int8)
    save_file(tensors, weights, metadata={"format": "pt"})
    content = bytearray(weights.read_bytes())
    if damage == "half":
        weights.write_bytes(content[: int(place * len(content))])
    elif damage == "bit":  # of the header: weights have no checksum
        size = int.from_bytes(content[:8], "little")
        content[int(place * (size + 8))] ^= 1 << which % 8
        weights.write_bytes(content)
        must_fail = False
    model = exported(folder)
    if model is not None:
        assert not must_fail
        stored = load_file(weights)
        for key, tensor in checkpoints.own_tensors(model).items():
            assert np.array_equal(tensor.detach(), stored[key].float()), key


def test_nothing_in_a_config_is_taken_on_trust(small_checkpoint: Path, tmp_path: Path) -> None:
    """Every value of config.json, replaced by others: a model that could be built, or one line."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in small_checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    content = json.loads((folder / "config.json").read_text())
    for key in content:
        for value in (None, True, -1, 0, 1.5, 10**12, "", "x", [], ["x"], {}, {"a": {}}):
            (folder / "config.json").write_text(json.dumps({**content, key: value}))
            try:
                checkpoints.load(folder)
            except EdgelinError as error:
                assert "\n" not in str(error) and len(str(error)) < 700
