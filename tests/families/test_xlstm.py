"""xLSTM checkpoints beside transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file
from transformers import xLSTMConfig, xLSTMForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert, read_json

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all

TOGETHER = {
    "mlstm_layer.qkv_opreact": ("q", "k", "v", "ogate_preact"),
    "mlstm_layer.ifgate_preact": ("igate_preact", "fgate_preact"),
    "ffn.proj_up_gate_z": ("proj_up_gate", "proj_up"),
}


def model(**changes: Any) -> Any:
    """A tiny random model; keys of another width than values, caps that are felt.

    Where a query meets next to nothing in the memory, the norm of a head would make rounding large,
    theirs as much as ours; ``norm_eps`` bounds that.
    """
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2,
        "qk_dim_factor": 0.75, "v_dim_factor": 1.25, "gate_soft_cap": 4.0,
        "output_logit_soft_cap": 3.0, "ffn_proj_factor": 1.3, "ffn_round_up_to_multiple_of": 12,
        "norm_eps": 1e-2,
    }  # fmt: skip
    theirs = oracle.randomise(xLSTMForCausalLM(xLSTMConfig(**{**sizes, **changes})))
    with torch.no_grad():  # from gates that write little, nothing would be seen of the memory
        for block in theirs.backbone.blocks:
            block.mlstm_layer.igate_preact.bias.add_(10.0)
            block.mlstm_layer.fgate_preact.bias.sub_(3.0)
    return theirs


def join(theirs: Any) -> Any:
    """The other storage of projections, which the class reads but cannot initialise."""
    theirs.config.weight_mode = "fused"
    for block in theirs.backbone.blocks:
        for name, parts in TOGETHER.items():
            place, _, joined = name.partition(".")
            owner = getattr(block, place)
            values = [getattr(owner, part).state_dict() for part in parts]
            both = {key: torch.cat([each[key] for each in values]) for key in values[0]}
            rows, columns = both["weight"].shape
            linear = torch.nn.Linear(columns, rows, bias="bias" in both)
            linear.load_state_dict(both)
            setattr(owner, joined, linear)
            for part in parts:
                delattr(owner, part)
    return theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bias": True, "norm_eps": 1e-3},
        {"eps": 0.3, "gate_soft_cap": 15.0, "output_logit_soft_cap": 30.0},
        {"num_heads": 8, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "ffn_proj_factor": 2.667},
        {"num_heads": 1, "qk_dim_factor": 0.99, "chunk_size": 16},  # 31 of 31.68 keys
        {"ffn_round_up_to_multiple_of": 64, "num_hidden_layers": 1},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


@pytest.mark.parametrize("bias", [False, True])
def test_projections_that_are_stored_together(tmp_path: Path, bias: bool) -> None:
    theirs = join(model(use_bias=bias))
    folder = oracle.save(theirs, tmp_path / "m")
    assert "backbone.blocks.1.ffn.proj_up_gate_z.weight" in load_file(folder / "model.safetensors")
    oracle.check_torch(theirs, folder)


def test_keys_of_the_published_config(tmp_path: Path) -> None:
    """What the config of xLSTM-7b has that transformers does not write."""
    theirs = model()
    folder = oracle.save(theirs, tmp_path / "m")
    values = read_json(folder / "config.json")
    for name in ("hidden_size", "num_hidden_layers", "add_out_norm"):
        del values[name]
    values |= {
        "add_embedding_dropout": False, "add_forward_backend_padding": False, "head_dim": 20,
        "add_post_blocks_norm": True, "add_post_norm": False, "add_qk_norm": False,
        "cell_norm_eps": 1e-2, "igate_bias_init_range": -10.0, "mlstm_round_up_to_multiple_of": 64,
        "chunkwise_kernel": "chunkwise--triton_xl_chunk", "step_kernel": "triton",
        "sequence_kernel": "native_sequence__triton", "forward_backend_name": "chunkwise--triton",
        "step_backend_name": "triton_fused",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    oracle.check_torch(theirs, folder)


def test_no_cap_on_logits(tmp_path: Path) -> None:
    theirs = model()
    folder = oracle.save(theirs, tmp_path / "m")
    oracle.rewrite(folder, output_logit_soft_cap=None)
    theirs.config.output_logit_soft_cap = 1e9  # the class takes a number only
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"slstm_at": [1]}, "'slstm_at', which this family does not know"),
        ({"add_qk_norm": True}, "add_qk_norm is True; supported: False"),
        ({"add_post_norm": True}, "add_post_norm is True; supported: False"),
        ({"add_out_norm": False}, "add_out_norm is False; supported: True"),
        ({"cell_norm_eps": 1e-3}, "cell_norm_eps is 0.001; supported: 0.01"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; supported: False"),
        ({"hidden_size": 64}, "hidden_size is 64; supported: 32"),
        ({"num_blocks": 1}, "num_hidden_layers is 2; supported: 1"),
        ({"gate_soft_cap": None}, "gate_soft_cap is null; supported: a number"),
        ({"gate_soft_cap": 99.0}, "gate_softcap is 99.0; it must be above 0 and at most 60"),
        ({"num_heads": 5}, "qk_dim_factor makes 24 numbers, which num_heads = 5 does not divide"),
        ({"weight_mode": "fused"}, r"lacks the tensor backbone\.blocks\.0\.mlstm_layer\.qkv_op"),
        ({"use_bias": False}, r"holds backbone\.blocks\.0\.ffn\.proj_down\.bias"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = oracle.save(model(use_bias=True), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")


def test_a_stray_tensor_is_refused(tmp_path: Path) -> None:
    folder = oracle.save(model(), tmp_path / "m")
    oracle.add_tensors(folder, {"backbone.blocks.0.mlstm_layer.conv.weight": torch.ones(2)})
    with pytest.raises(EdgelinError, match=r"conv\.weight, which its config does not account"):
        convert(folder, tmp_path / "own")
