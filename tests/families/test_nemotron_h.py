"""Nemotron-H checkpoints beside transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig, NemotronHForCausalLM

from edgelin import checkpoint as checkpoints
from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all

LAYERS = ["mamba", "mlp", "attention", "mlp"]
FREE = (0.0, float("inf"))


def model(limit: tuple[float, float] = FREE, **changes: Any) -> Any:
    """A tiny random model; two groups, heads that are not hidden / heads wide.

    transformers' full pass takes ``time_step_min`` for a bound of the step, which the models were
    not trained with: it is given the limit that they were.
    """
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 40,
        "layers_block_type": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 12, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 10,
        "n_groups": 2, "chunk_size": 16, "time_step_limit": limit, "tie_word_embeddings": False,
    }  # fmt: skip
    theirs = oracle.randomise(NemotronHForCausalLM(NemotronHConfig(**{**sizes, **changes})))
    bound(theirs, limit)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.arange(len(buffer)).roll(2) / 8)  # bfloat16 has these
    return theirs


def sparse(**changes: Any) -> Any:
    """A model with experts, narrower than the stream."""
    sizes = {
        "layers_block_type": ["mamba", "moe", "full_attention", "moe"], "n_routed_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 12, "routed_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 14, "moe_latent_size": 20, "mlp_bias": True,
    }  # fmt: skip
    return model(**{**sizes, **changes})


def bound(theirs: Any, limit: tuple[float, float]) -> None:
    """Set what bounds dt in a full pass."""
    for layer in theirs.model.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(use_bias=True, mlp_bias=True), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_groups": 4, "layer_norm_epsilon": 1e-2},
        {"use_conv_bias": False, "conv_kernel": 3},
        {"limit": (0.5, 1.5)},
        {"layers_block_type": ["full_attention", "linear_attention", "linear_attention"]},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_with_experts(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(sparse(), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_group": 3, "topk_group": 2, "norm_topk_prob": False},
        {"moe_latent_size": None, "mlp_bias": False, "num_experts_per_tok": 1},
        {"moe_latent_size": None, "routed_scaling_factor": 1.0},
    ],
    ids=str,
)
def test_switches_of_experts(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = sparse(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_experts_in_one_tensor_and_a_pattern(tmp_path: Path) -> None:
    """The layout of transformers' class, where a folder of its own writing has the hub's."""
    theirs = sparse()
    folder = oracle.save(theirs, tmp_path / "m")
    assert "backbone.layers.1.mixer.experts.5.up_proj.weight" in load_file(
        folder / "model.safetensors"
    )
    values = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    oracle.rewrite(folder, without=("layers_block_type",), hybrid_override_pattern="ME*E")
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_shared_experts": 2}, "n_shared_experts is 2; supported: 1"),
        ({"n_routed_experts": 5}, r"of \S*gate\.weight, \S*router\.weight would .* \[6, .* it \[5"),
        ({"moe_shared_expert_intermediate_size": 15}, r"shared\.up_proj\.weight would have shape"),
        ({"moe_latent_size": None}, "experts.up_proj would have shape"),
        ({"n_group": 4}, "num_groups is 4; give a divisor of num_experts = 6"),
        ({"hybrid_override_pattern": "ME*X", "without": ("layers_block_type",)}, "has 'X'; .*'E'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_experts_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = oracle.save(sparse(), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")


@torch.no_grad()
def test_initial_values_of_the_step_bound_nothing(tmp_path: Path) -> None:
    """The steps of transformers are ours; its full pass has a floor that the models have not."""
    theirs = model(time_step_min=0.4, time_step_max=0.9)
    convert(oracle.save(theirs, tmp_path / "m"), tmp_path / "own")
    ours, _ = checkpoints.load(tmp_path / "own")
    tokens = oracle.ids(3, 70)
    first = theirs(tokens[:, :1], use_cache=True)
    bound(theirs, (0.4, float("inf")))
    logits, cache = [first.logits], first.cache
    for token in tokens[:, 1:].split(1, dim=1):
        out = theirs(token, cache=cache, use_cache=True)
        logits, cache = [*logits, out.logits], out.cache
    oracle.near(ours(tokens)[0], torch.cat(logits, 1), 1e-4, "steps")
    assert (oracle.full(theirs, tokens) - ours(tokens)[0]).abs().max() > 0.01


def test_a_pattern_and_other_names_of_older_configs(tmp_path: Path) -> None:
    theirs = model()
    folder = oracle.save(theirs, tmp_path / "m")
    new = ("layers_block_type", "head_dim", "n_groups", "conv_kernel", "use_conv_bias",
           "time_step_limit")  # fmt: skip
    oracle.rewrite(
        folder, without=new, hybrid_override_pattern="M-*-", num_hidden_layers=4,
        attention_head_dim=12, mamba_n_groups=2, mamba_d_conv=4, mamba_conv_bias=True,
        norm_eps=1e-5, expand=2, rms_norm_eps=1e-5, rope_theta=10000, partial_rotary_factor=1.0,
        mamba_dt_limit=[0.0, 9e9],
    )  # fmt: skip
    oracle.check_torch(theirs, folder)


def test_names_of_the_class_and_drafts(tmp_path: Path) -> None:
    """Tensors under transformers' own names, with a draft head that is left out."""
    theirs = model()
    folder = oracle.save(theirs, tmp_path / "m")
    values = load_file(folder / "model.safetensors")
    assert "backbone.layers.0.mixer.in_proj.weight" in values
    values = {name.replace("backbone.", "model."): tensor for name, tensor in values.items()}
    values["mtp.layers.0.norm.weight"] = torch.ones(32)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"residual_scale": 2.0}, "'residual_scale', which this family does not know"),
        ({"layers_block_type": ["mamba", "gru"] * 2}, "has 'gru'; supported: 'M'"),
        ({"without": ("layers_block_type",)}, "lacks the key 'layers_block_type'"),
        ({"hybrid_override_pattern": "MMMM"}, "name different layers"),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 5; supported: 4"),
        ({"attention_bias": True}, "attention_bias is True; supported: False"),
        ({"sliding_window": 512}, "sliding_window is 512; supported: nothing"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; supported: 'relu2'"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06; supported: 1e-05"),
        ({"use_bias": False}, r"holds .*\.layers\.0\.mixer\.in_proj\.bias"),
        ({"mlp_bias": True}, r"lacks the tensor .*\.layers\.1\.mixer\.up_proj\.bias"),
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
