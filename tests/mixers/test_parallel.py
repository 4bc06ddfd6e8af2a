"""What is special to mixers side by side; the rest is in test_mixers.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from edgelin import mixers
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.model import SequenceModel, _most_in_blocks

MAMBA2 = {"type": "mamba2", "num_heads": 4, "head_dim": 5, "state_size": 6}
LTI = {"type": "lti", "inner_size": 10, "state_size": 5}
WINDOW = {"type": "attention", "num_heads": 2, "num_kv_heads": 2, "head_dim": 6, "window": 64}


def build(*parts: dict[str, Any]) -> Any:
    """The parts in layer 0 of a stream of 20."""
    table = {"type": "parallel", "parts": list(parts)}
    return mixers.build(table, 20, 0, 1e-6, where="model.mixers.m")


@torch.no_grad()
def test_parts_are_exported_in_their_own_forms() -> None:
    mixer = build(LTI, MAMBA2)
    form = copy.deepcopy(mixer).step_form()
    assert {spec.kind for spec in form.state_specs()} == {"ssm_re", "ssm_im", "conv", "recurrent"}
    x, outputs = torch.randn(2, 9, 20), []
    for each in (mixer, form):
        state = {spec.name: torch.zeros(2, *spec.shape) for spec in each.state_specs()}
        outputs.append(each(x, state, torch.tensor([0, 0]))[0])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)


def test_the_obstacle_of_a_part_is_one_of_all() -> None:
    assert build(MAMBA2, WINDOW).config.export_obstacle is None
    short = build(MAMBA2, {**WINDOW, "window": 8})
    assert "window of 8 can't be exported" in short.config.export_obstacle


def test_a_position_is_asked_for_if_a_part_needs_it() -> None:
    assert build(MAMBA2, WINDOW).needs_position
    assert not build(MAMBA2, LTI).needs_position


def test_the_size_of_parts_counts() -> None:
    """What is checked before a model takes memory is no less than what it takes."""
    wide = {**MAMBA2, "num_heads": 512, "head_dim": 16}
    config = ModelConfig(
        vocab_size=50,
        hidden_size=20,
        intermediate_size=0,
        layers=("m",),
        mixers={"m": {"type": "parallel", "parts": [WINDOW, wide]}},
    )
    assert _most_in_blocks(config) > SequenceModel(config).num_parameters() > 500_000


@pytest.mark.parametrize(
    "parts, message",
    [
        ([], "parts is empty; give the tables of at least one mixer"),
        ([{"type": "mamba9"}], "'mamba9' is not known"),
        ([{**MAMBA2, "heads": 2}], r"parts\[0\] has an unknown key 'heads'"),
        ([{"num_heads": 2}], r"parts\[0\] lacks the key 'type'"),
        ([MAMBA2, MAMBA2], "two of the parts 'mamba2', 'mamba2' have states of one kind"),
        (
            [{"type": "rwkv7", "num_heads": 2, "key_dim": 10, "value_dim": 10}],
            "'rwkv7' shares tensors",
        ),
    ],
)
def test_wrong_parts_are_refused(parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        build(*parts)


def test_a_part_starts_with_its_own_initial_values() -> None:
    """Those of RWKV-6 are made after the model's normal ones."""
    part = {"type": "rwkv6", "num_heads": 2, "key_dim": 10, "value_dim": 10}
    models = [
        SequenceModel(
            ModelConfig(
                vocab_size=50, hidden_size=20, intermediate_size=8, layers=("m",), mixers={"m": m}
            )
        )
        for m in (part, {"type": "parallel", "parts": [part, WINDOW]})
    ]
    alone, beside = models[0].blocks[0].mixer, models[1].blocks[0].mixer.parts[0]
    for name, own in alone.named_parameters():
        if name in ("mix_base", "mix_bias", "bonus", "decay_out_proj.bias"):  # not random
            assert torch.equal(own, dict(beside.named_parameters())[name]), name
