"""What is special to shared blocks: one set of weights for several layers, in graphs too."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export_models import VOCAB
from loops import gla, shared_block
from torch import Tensor

from edgelin import checkpoint, mixers, tokenizer
from edgelin.errors import EdgelinError
from edgelin.export.bundle import export_checkpoint
from edgelin.export.verify.compare import verify
from edgelin.model import SequenceModel, _most_in_blocks, check_size
from edgelin.model_config import ModelConfig

HIDDEN = 20
BLOCK = shared_block.CASES["shared block, all tokens"]
OTHER = {**BLOCK, "number": 1}
GLA = {"type": "gla", "num_heads": 2, "key_dim": 6, "value_dim": 10}


def model(sides: tuple[str, ...] = ("a", "b", "", "a"), **tables: Any) -> SequenceModel:
    """Layers of a recurrence, most with a block at their side: two blocks in turn."""
    torch.manual_seed(2)
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=0,
        layers=("gla",) * len(sides),
        sides=sides,
        mixers={"gla": GLA, "a": BLOCK, "b": OTHER, **tables},
        rms_norm_eps=1e-6,
    )
    made = SequenceModel(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
        else:
            parameter += 0.2 * torch.randn(parameter.shape)
    return made


def test_layers_of_one_table_have_one_set_of_weights_but_for_adapters() -> None:
    made = model()
    first, other, last = (made.blocks[i].side for i in (0, 1, 3))
    own = {name for name, tensor in last.named_parameters() if tensor is not _get(first, name)}
    assert own == {name for name, _ in last.named_parameters() if _is_own(name)}
    assert not {id(p) for p in first.parameters()} & {id(p) for p in other.parameters()}
    stored = checkpoint.own_tensors(made)
    assert {name for name in stored if name.startswith("blocks.3.side.")} == {
        f"blocks.3.side.{name}" for name in own
    }
    assert made.num_parameters() == sum(tensor.numel() for tensor in stored.values())
    kinds = [spec.name for spec in made.state_specs() if spec.kind == "key"]
    assert kinds == ["key.0", "key.1", "key.3"]


def _get(module: Any, name: str) -> Tensor:
    return dict(module.named_parameters())[name]


def _is_own(name: str) -> bool:
    return ".inner." in name or ".outer." in name or name == "out_proj.weight"


@torch.no_grad()
def test_a_side_is_read_by_the_mixer_and_not_added_to_the_stream() -> None:
    """The loops, layer by layer: x + mixer(norm(x + side(x, embedding)))."""
    made = copy.deepcopy(model()).double()
    ids = torch.randint(0, VOCAB, (2, 70), generator=torch.Generator().manual_seed(1))
    embedding = made.embedding.weight[ids].numpy()
    x, position, empty = embedding, np.zeros(2, np.int64), np.zeros((2, 2, 0, 6))
    for block in made.blocks:
        read = x
        if hasattr(block, "side"):
            states = {"key.3": empty, "value.3": empty}
            read = x + shared_block.loop(block.side, x, states, position, embedding)[0]
        state = {"recurrent.3": np.zeros((2, 2, 6, 10))}
        x = x + gla.loop(block.mixer, _normed(read, block.mixer_norm), state, position)[0]
    wanted = _normed(x, made.norm) @ made.embedding.weight.numpy().T
    np.testing.assert_allclose(made(ids)[0], wanted, rtol=0, atol=1e-9 * np.abs(wanted).max())


def _normed(x: np.ndarray, norm: Any) -> np.ndarray:
    result: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * norm.weight.numpy()
    return result


def test_memory_is_counted_once() -> None:
    made = model()
    states = sum(math.prod(s.sized()) for s in made.state_specs() if s.layer is not None)
    need = 4 * (made.num_parameters() - HIDDEN + states)  # but for the last norm and the position
    check_size(made.config, memory=need)
    with pytest.raises(EdgelinError, match=r"the model has .* parameters"):
        check_size(made.config, memory=need - 1)
    assert _most_in_blocks(made.config) > made.num_parameters()


def test_bundles_hold_a_block_once(tmp_path: Path) -> None:
    """Rounded weights too: what the graphs compute is compared with the model in float64."""
    made, out = model(("a", "a")), tmp_path / "bundle"
    text = tokenizer.train(["a small text of a few words and more words " * 20], VOCAB)
    checkpoint.save(tmp_path / "m", made, text.to_str())
    export_checkpoint(tmp_path / "m", out, quantise=("none", "int4"))
    verify(out, tmp_path / "m")
    for name in ("model", "model_q4"):
        held = ir.load(out / "onnx" / f"{name}.onnx").graph.initializers
        assert not [n for n in held if n.startswith("blocks.1.side.") and ".shared" in n]
        block = [v for n, v in held.items() if n.startswith("blocks.0.side.mixer.qkv_proj.shared")]
        assert block and all(len(list(value.uses())) == 2 for value in block)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"attention": {**BLOCK["mlp"]}}, "attention is of type 'mlp'; it needs the type"),
        ({"mlp": {**BLOCK["attention"]}}, "mlp is of type 'attention'; it needs the type 'mlp'"),
        ({"mlp": {"type": "mlp", "width": 3}}, "mlp has an unknown key 'width'"),
        ({"adapter_rank": -1}, "adapter_rank is -1; give at least 0"),
        ({"adapter_rank": 0}, "attention_adapter needs adapter_rank above 0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_parts_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        mixers.build({**BLOCK, **change}, HIDDEN, 0, 1e-6, where="m")


def test_a_short_window_is_not_exported() -> None:
    short = {**BLOCK, "attention": {**BLOCK["attention"], "window": 8}}
    mixer = mixers.build(short, HIDDEN, 0, 1e-6, where="m")
    assert "window of 8 can't be exported" in mixer.config.export_obstacle
