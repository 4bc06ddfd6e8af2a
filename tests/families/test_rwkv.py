"""RWKV-6 and RWKV-7 checkpoints beside the published equations in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import oracle_rwkv as rwkv
import pytest
import torch
from oracle_fla import check
from safetensors.torch import load_file, save_file

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

V7: dict[str, Any] = {
    "model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], "attn": None,
    "attn_mode": "chunk", "hidden_size": rwkv.HIDDEN, "num_hidden_layers": rwkv.LAYERS,
    "head_dim": 8, "num_heads": 32, "hidden_ratio": 2.0, "intermediate_size": None,
    "decay_low_rank_dim": 5, "a_low_rank_dim": 6, "v_low_rank_dim": 7, "gate_low_rank_dim": 9,
    "hidden_act": "sqrelu", "norm_first": True, "norm_bias": True, "norm_eps": 1e-3,
    "fuse_norm": True, "use_l2warp": True, "fuse_cross_entropy": True, "bos_token_id": 1,
    "value_dim": [rwkv.HIDDEN] * rwkv.LAYERS, "vocab_size": oracle.VOCABULARY,
    "tie_word_embeddings": False,
}  # fmt: skip
V6: dict[str, Any] = {
    "model_type": "rwkv6", "attn": None, "attn_mode": "chunk", "hidden_size": rwkv.HIDDEN,
    "num_hidden_layers": rwkv.LAYERS, "num_heads": 4, "expand_k": 0.5, "expand_v": 1.5,
    "hidden_ratio": 2, "intermediate_size": 64, "proj_low_rank_dim": 3, "gate_low_rank_dim": 6,
    "hidden_act": "sqrelu", "norm_first": True, "norm_bias": True, "norm_eps": 1e-3,
    "fuse_norm": True, "vocab_size": oracle.VOCABULARY, "tie_word_embeddings": False,
}  # fmt: skip


def v7(**changes: Any) -> Any:
    """fla's RWKV-7, each switch once."""
    config = {**V7, **changes}
    width = config["value_dim"] if isinstance(config["value_dim"], int) else rwkv.HIDDEN
    weights = _switched(rwkv.rwkv7_weights(value=width), config)
    for i in range(rwkv.LAYERS):  # so small that the epsilon of kk counts
        weights[f"blocks.{i}.att.k_k"] *= 2e-3
    eps = config["norm_eps"]
    mix = rwkv.mix7(8 * eps, 1e-6 if config["fuse_norm"] else None)
    return rwkv.published(weights, config, mix, rwkv.ffn7, eps)


def v6(**changes: Any) -> Any:
    """fla's RWKV-6 with keys and values of other widths than the stream."""
    config = {**V6, **changes}
    weights = _switched(rwkv.rwkv6_weights(key=16, value=48), config)
    eps = config["norm_eps"]
    return rwkv.published(weights, config, rwkv.mix6(eps), rwkv.ffn6, eps)


def _switched(weights: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The weights that a config has."""
    gone = set()
    if not config["norm_first"]:
        gone |= {"blocks.0.ln0.weight", "blocks.0.ln0.bias"}
    if not config["norm_bias"]:
        gone |= {n for n in weights if n.split(".")[-2][:2] == "ln" and n.endswith("bias")}
        gone -= {n for n in weights if "ln_x" in n}
    if config["tie_word_embeddings"]:
        gone.add("head.weight")
    return {name: array for name, array in weights.items() if name not in gone}


CASES: dict[str, Any] = {
    "7, .pth": lambda: rwkv.published(rwkv.rwkv7_weights(), None, rwkv.mix7(), rwkv.ffn7),
    "7": v7,
    "7, wide values, no norms of fla": lambda: v7(value_dim=64, fuse_norm=False),
    "7, tied, no biases, no first norm": lambda: v7(
        tie_word_embeddings=True, norm_bias=False, norm_first=False, head_dim=None, num_heads=4
    ),
    "6, .pth": lambda: rwkv.published(rwkv.rwkv6_weights(), None, rwkv.mix6(), rwkv.ffn6),
    "6": v6,
    "6, tied, no biases, no first norm": lambda: v6(
        tie_word_embeddings=True, norm_bias=False, norm_first=False
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    theirs = CASES[case]()
    ours = check(theirs, theirs.save(tmp_path / "m"))
    if case in ("7, .pth", "6"):
        oracle.check_graphs(theirs, ours)


@pytest.mark.parametrize("case", ["7, .pth", "6"])
def test_bfloat16(case: str, tmp_path: Path) -> None:
    theirs = CASES[case]()
    check(theirs, theirs.save(tmp_path / "m", torch.bfloat16))


def test_the_first_version_of_fla_stacks_its_mixtures(tmp_path: Path) -> None:
    theirs = v7()
    folder = theirs.save(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    for i in range(rwkv.LAYERS):
        own = f"model.layers.{i}.attn."
        parts = [tensors.pop(f"{own}x_{part}").flatten() for part in "rwkvag"]
        tensors[f"{own}x_x"] = torch.stack(parts)
    save_file(tensors, folder / "model.safetensors")
    check(theirs, folder)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"attn": {"layers": [1], "num_heads": 2}}, "attn"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"value_dim": [32, 64, 32]}, "value_dim"),
        ({"deep_embed": 1}, "'deep_embed'"),
    ],
)
def test_refuses_what_it_does_not_compute(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    theirs = v7()
    theirs.config |= change
    with pytest.raises(EdgelinError, match=words):
        convert(theirs.save(tmp_path / "m"), tmp_path / "own")


def test_refuses_other_pth_files(tmp_path: Path) -> None:
    weights = rwkv.rwkv7_weights()
    theirs = rwkv.published(weights, None, rwkv.mix7(), rwkv.ffn7)
    theirs.weights["blocks.1.ffn.s_emb.weight"] = theirs.weights["emb.weight"]
    folder = theirs.save(tmp_path / "extra")
    with pytest.raises(EdgelinError, match=r"s_emb.*does not account for"):
        convert(folder, tmp_path / "own")
    torch.save({"a.weight": torch.zeros(1)}, folder / "another.pth")
    with pytest.raises(EdgelinError, match=r"several \.pth files"):
        convert(folder, tmp_path / "own")
    (folder / "model.pth").unlink()
    with pytest.raises(EdgelinError, match=r"no config\.json.*rwkv6, rwkv7"):
        convert(folder, tmp_path / "own")
