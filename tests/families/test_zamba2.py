"""Zamba2 checkpoints beside transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file
from transformers import Zamba2Config, Zamba2ForCausalLM

from edgelin import checkpoint as checkpoints
from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all

LAYERS = ["hybrid", "hybrid", "mamba", "hybrid"]  # blocks 0, 1 and 0 again
SMALL = {
    "layers_block_type": ["hybrid", "mamba", "hybrid"], "num_hidden_layers": 3,
    "num_mem_blocks": 1,
}  # fmt: skip
FREE = (0.0, float("inf"))


def model(limit: tuple[float, float] = FREE, **changes: Any) -> Any:
    """A tiny random model with two blocks, one of them used twice, and two groups.

    transformers' full pass takes ``time_step_min`` for a bound of the step, which the models were
    not trained with, and it shares blocks only where it ties the head to the embedding.
    """
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 24, "intermediate_size": 36,
        "num_hidden_layers": len(LAYERS), "layers_block_type": LAYERS, "num_attention_heads": 4,
        "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 8, "chunk_size": 16,
        "num_mem_blocks": 2, "adapter_rank": 3, "use_mem_rope": True,
        "use_shared_attention_adapter": True,
    }  # fmt: skip
    theirs = Zamba2ForCausalLM(Zamba2Config(**{**sizes, **changes}))
    theirs = oracle.randomise(theirs, scale=0.6)
    for layer in theirs.model.layers:
        getattr(layer, "mamba_decoder", layer).mamba.time_step_limit = limit
    return theirs


@pytest.mark.parametrize("dtype, changes", [(torch.float32, SMALL), (torch.bfloat16, {})])
def test_logits(tmp_path: Path, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    oracle.check_logits(model(add_bias_linear=True, **changes), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_mem_blocks": 1, "use_mem_rope": False, "use_shared_attention_adapter": False},
        {"num_mem_blocks": 4, "tie_word_embeddings": False, "mamba_ngroups": 1},
        {"num_key_value_heads": 2, "use_shared_attention_adapter": False, "hidden_act": "silu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "mamba_d_conv": 3},
        {"layers_block_type": ["mamba"] * 4, "mamba_expand": 3},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_blocks_are_stored_once(tmp_path: Path) -> None:
    folder = oracle.save(model(), tmp_path / "m")
    convert(folder, tmp_path / "own")
    stored = load_file(tmp_path / "own" / "model.safetensors")
    assert "blocks.0.side.mixer.qkv_proj.shared.weight" in stored
    later = {name for name in stored if name.startswith("blocks.3.side")}
    adapters = {name for name in later if ".inner." in name or ".outer." in name}
    assert len(adapters) == 6 and later - adapters == {"blocks.3.side.out_proj.weight"}
    theirs = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert sum(tensor.numel() for tensor in stored.values()) == theirs
    ours, _ = checkpoints.load(tmp_path / "own")
    assert ours.num_parameters() == theirs


def test_keys_of_the_published_configs_and_copies_of_blocks(tmp_path: Path) -> None:
    """What configs have that older versions wrote, and files that hold a block at every use."""
    theirs = model(rope_parameters={"rope_type": "default", "rope_theta": 99.0}, limit=(0.5, 1.5))
    folder = oracle.save(theirs, tmp_path / "m")
    oracle.rewrite(
        folder, without=("rope_parameters",), rope_theta=99, hybrid_layer_ids=[0, 1, 3],
        layers_block_type=LAYERS, time_step_limit=[0.5, 1.5], ffn_hidden_size=36, kv_channels=6,
        num_query_groups=4, attention_head_dim=12, attention_hidden_size=48, mamba_headdim=12,
        use_shared_mlp_adapter=True, use_mem_eff_path=True, num_logits_to_keep=1,
        use_long_context=False,
    )  # fmt: skip
    values = load_file(folder / "model.safetensors")
    own = {name: tensor for name, tensor in values.items() if ".0.shared_transformer." in name}
    copies = {name.replace("layers.0.", "layers.3."): t.clone() for name, t in own.items()}
    oracle.add_tensors(folder, copies)
    oracle.check_torch(theirs, folder)
    name = "model.layers.3.shared_transformer.feed_forward.down_proj.weight"
    oracle.add_tensors(folder, {name: copies[name] + 1})
    with pytest.raises(EdgelinError, match=rf"{name} is not model\.layers\.0\..*num_mem_blocks"):
        convert(folder, tmp_path / "other")


@torch.no_grad()
def test_initial_values_of_the_step_bound_nothing(tmp_path: Path) -> None:
    """The steps of transformers are ours; its full pass has a floor that the models have not."""
    theirs = model(time_step_min=0.4, limit=(0.4, float("inf")))
    convert(oracle.save(theirs, tmp_path / "m"), tmp_path / "own")
    ours, _ = checkpoints.load(tmp_path / "own")
    tokens = oracle.ids(3, 70)
    floor = oracle.full(theirs, tokens)
    for layer in theirs.model.layers:
        getattr(layer, "mamba_decoder", layer).mamba.time_step_limit = FREE
    first = theirs(tokens[:, :1], use_cache=True)
    logits, cache = [first.logits], first.cache
    for token in tokens[:, 1:].split(1, dim=1):
        out = theirs(token, cache=cache, use_cache=True)
        logits, cache = [*logits, out.logits], out.cache
    oracle.near(ours(tokens)[0], torch.cat(logits, 1), 1e-4, "steps")
    assert (floor - ours(tokens)[0]).abs().max() > 0.01


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"residual_scale": 2.0}, "'residual_scale', which this family does not know"),
        ({"layers_block_type": ["mamba", "gru"]}, "layers_block_type has 'gru'; supported"),
        ({"layers_block_type": LAYERS[:3]}, "layers_block_type has 3 words for num_hidden_layers"),
        ({"hybrid_layer_ids": [0, 1]}, r"hybrid_layer_ids is \[0, 1\]; supported: \[0, 1, 3\]"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06; supported: 1e-05"),
        ({"use_conv_bias": False}, "use_conv_bias is False; supported: True"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported: 'gelu'"),
        ({"attention_head_dim": 6}, "attention_head_dim is 6; supported: 12"),
        ({"use_shared_mlp_adapter": False}, "use_shared_mlp_adapter is False; supported: True"),
        ({"use_long_context": True}, "use_long_context is True; supported: False"),
        ({"use_shared_attention_adapter": False}, r"holds .*linear_k_adapter_list\.0\.0\.weight"),
        ({"num_mem_blocks": 3}, r"lacks the tensor model\.layers\.3\.shared_transformer\."),
        ({"num_mem_blocks": 1}, r"layers\.1\..* is not model\.layers\.0\..* makes them one"),
        ({"add_bias_linear": False}, r"holds model\.layers\..*\.bias"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = oracle.save(model(add_bias_linear=True), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")


def test_a_stray_tensor_is_refused(tmp_path: Path) -> None:
    folder = oracle.save(model(), tmp_path / "m")
    oracle.add_tensors(folder, {"model.layers.2.mamba.gate": torch.ones(3)})
    with pytest.raises(EdgelinError, match=r"holds model\.layers\.2\.mamba\.gate, which"):
        convert(folder, tmp_path / "own")
