"""Mixers of one's own with a mistake each: told in one line when the model is built."""

from __future__ import annotations

import itertools
import re
import sys
import types
from pathlib import Path

import pytest

from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.export.trace import trace
from edgelin.model import SequenceModel

MODULE = '''
from dataclasses import dataclass
import torch
from torch import nn
from edgelin.mixers import HeadSizes
from edgelin.recurrences.linear import linear
from edgelin.state import StateSpec

@dataclass(frozen=True)
class Config(HeadSizes):
    """Sizes."""

class Mixer(nn.Module):
    def __init__(self, config, hidden_size, layer, norm_eps):
        super().__init__()
        self.config, self.layer = config, layer
        self.proj = nn.Linear(hidden_size, config.num_heads * config.key_dim, bias=False)
        self.out_proj = nn.Linear(config.num_heads * config.key_dim, hidden_size, bias=False)

    def reset_parameters(self):
        nn.init.ones_(self.proj.weight[0])

    def state_specs(self):
        return [self.config.matrix_spec(self.layer)]

    def forward(self, x, state, position, lengths=None):
        name = f"recurrent.{self.layer}"
        q = self.proj(x).unflatten(-1, (self.config.num_heads, -1))
        o, after = linear(q, q, q, None, state[name], lengths=lengths)
        return self.out_proj(o.flatten(-2)), {name: after}
'''
RETURN = "return self.out_proj(o.flatten(-2)), {name: after}"
SPECS = "return [self.config.matrix_spec(self.layer)]"
MANY = itertools.count()


def build(*changes: tuple[str, str], **model: object) -> SequenceModel:
    """A model of two layers of the mixer above with these changes of its source."""
    code = MODULE
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    name = f"lab_{next(MANY)}.mine"
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(code, f"/home/me/{name}.py", "exec"), module.__dict__)
    table = {"type": name, "num_heads": 2, "key_dim": 4, "value_dim": 4}
    config = {"vocab_size": 16, "intermediate_size": 0, "layers": ("m", "m"), "mlps": ()} | model
    return SequenceModel(ModelConfig(hidden_size=8, mixers={"m": table}, **config))  # type: ignore[arg-type]


MISTAKES = {
    "forward raises": (
        ("q = self", 'raise ValueError("my\\nbug")\n        q = self'),
        r"mine\.Mixer\.forward raised ValueError: my bug \(/home/me/lab_\d+\.mine\.py, line 28\)$",
    ),
    "wrong name": (
        ('{self.layer}"', '{self.layer + 9}"'),
        r"forward raised KeyError: 'recurrent\.9'",
    ),
    "no initial": ((", layer, norm_eps)", ")"), r"mine\.Mixer raised TypeError: .* positional"),
    "config raises": (
        ('"""Sizes."""', "def __post_init__(self): raise KeyError(1)"),
        r"mine\.Config raised KeyError: 1",
    ),
    "reset raises": (("self.proj.weight[0]", "self.weight"), r"reset_parameters raised Attribute"),
    "no module": (("class Mixer(nn.Module)", "class Mixer"), r"Mixer is no torch\.nn\.Module"),
    "no specs": (("def state_specs", "def specs"), r"state_specs raised AttributeError"),
    "specs of words": (
        (SPECS, "return ['recurrent']"),
        r"gives \['recurrent'\]; a list of StateSp",
    ),
    "strange kind": (
        (SPECS, "return [StateSpec('a/b', self.layer, (2,), 'batch x')]"),
        r"a state of kind 'a/b'; small letters",
    ),
    "empty state": (
        (SPECS, "return [StateSpec('a', self.layer, (0,), 'batch x')]"),
        r"state 'a\.0' of shape \(0,\); sizes from 1",
    ),
    "half state": (
        (SPECS, "return [StateSpec('a', self.layer, (2,), 'batch x', dtype='float16')]"),
        r"state 'a\.0' of float16; float32 and int64 are allowed",
    ),
    "position": (
        (SPECS, "return [StateSpec('position', None, (), 'batch', dtype='int64')]"),
        r"a state 'position' of the whole model",
    ),
    "same layer": (("matrix_spec(self.layer)", "matrix_spec(0)"), r"'recurrent\.0', which .* too"),
    "one result": ((RETURN, "return self.out_proj(o.flatten(-2))"), r"forward returns Tensor; \(y"),
    "narrow output": (
        ("self.out_proj(o.flatten(-2))", "self.out_proj(o.flatten(-2))[..., :1]"),
        r"outputs of shape \[2, 5, 1\] and float32; \[2, 5, 8\]",
    ),
    "last step only": (
        ("self.out_proj(o.flatten(-2))", "self.out_proj(o.flatten(-2))[:, -1:]"),
        r"outputs of shape \[2, 1, 8\] and float32; \[2, 5, 8\]",
    ),
    "not finite": (("o.flatten(-2)", "o.flatten(-2) / 0"), r"outputs that are not finite"),
    "state of a head": (
        ("name: after}", "name: after[:, :1]}"),
        r"'recurrent\.0' of shape \[2, 1, 4",
    ),
    "half result": (("name: after}", "name: after.half()}"), r"\[2, 2, 4, 4\] and float16; "),
    "no state": (("{name: after}", "{}"), r"returns the states \[\], state_specs has \['rec"),
    "more states": (
        ("after}", "after, 'b': after}"),
        r"returns the states \['b', 'recurrent\.0'\]",
    ),
    "looks ahead": (("q, q, q,", "q, q, q.flip(1),"), r"outputs of a call of 5 steps differ"),
    "sums by itself": (("q, q, q,", "q, q, q.cumsum(1),"), r"outputs of a call of 5 steps differ"),
    "forgets": (("state[name], ", "state[name] * 0, "), r"outputs of a call of 5 steps differ"),
    "wrong state": (("after}", "after * x.shape[1]}"), r"the state 'recurrent\.0' of a call of 5"),
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_in_one_line(change: tuple[str, str], message: str) -> None:
    with pytest.raises(EdgelinError) as told:
        build(change)
    assert re.search(message, str(told.value)), told.value
    assert "\n" not in str(told.value)


def test_a_mixer_without_mistakes_is_left_alone() -> None:
    model = build()
    assert model.training and model.blocks[0].mixer.training  # type: ignore[union-attr]


def test_our_own_mixers_cannot_share_a_state_either() -> None:
    table = {"type": "gla", "num_heads": 2, "key_dim": 4, "value_dim": 4}
    with pytest.raises(EdgelinError, match=r"gla\.Mixer has a state 'recurrent\.0', which"):
        SequenceModel(ModelConfig(8, 0, ("m",), {"m": table}, vocab_size=16, mlps=("m",)))


def test_what_cannot_be_traced_is_told_in_one_line(tmp_path: Path) -> None:
    model = build(("q = self", "x = x * 2 if x.abs().sum() < 0 else x\n        q = self")).eval()
    with pytest.raises(EdgelinError, match=r"cannot be traced: .* depend on a tensor's") as told:
        trace(model)
    assert "\n" not in str(told.value)
