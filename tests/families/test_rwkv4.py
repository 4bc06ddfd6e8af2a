"""RWKV-4 checkpoints beside transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import RwkvConfig, RwkvForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all

AUTHORS = {
    "rwkv.embeddings": "emb", "rwkv.": "", "pre_ln": "ln0", "attention": "att",
    "feed_forward": "ffn", "time_mix_key": "time_mix_k", "time_mix_value": "time_mix_v",
    "time_mix_receptance": "time_mix_r",
}  # fmt: skip


def model(**changes: Any) -> Any:
    """A tiny random model, with more channels of keys than of the stream."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "attention_hidden_size": 40,
        "intermediate_size": 56, "num_hidden_layers": 2,
    }  # fmt: skip
    return oracle.randomise(RwkvForCausalLM(RwkvConfig(**{**sizes, **changes})))


def save_pth(theirs: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the file that the authors publish, which transformers' converter reads."""
    folder.mkdir()
    oracle.tokenizer(folder)
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        for word, other in AUTHORS.items():
            name = name.replace(word, other)
        tensors[name] = tensor.to(dtype)
    torch.save(tensors, folder / "model.pth")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(), tmp_path / "m", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_the_authors(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = oracle.rounded(model(), dtype)
    oracle.check_torch(theirs, save_pth(theirs, tmp_path / "m", dtype))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_hidden_size": None, "intermediate_size": None, "context_length": 8},
        {"tie_word_embeddings": True, "attention_hidden_size": 24},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


@torch.no_grad()
def test_the_halved_stream_is_the_same(tmp_path: Path) -> None:
    """Large beside the epsilon of the norms, which is not halved."""
    theirs = model(rescale_every=1)
    for parameter in theirs.rwkv.blocks[0].pre_ln.parameters():
        parameter *= 10
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))
    assert theirs.rwkv.layers_are_rescaled


@torch.no_grad()
def test_large_keys(tmp_path: Path) -> None:
    """Of which an exponential alone would be infinite."""
    theirs, largest = model(), []
    for block in theirs.rwkv.blocks:
        block.attention.key.weight *= 60
        block.attention.key.register_forward_hook(lambda _, __, k: largest.append(k.max()))
    ours = oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"), 2e-4)
    oracle.check_graphs(theirs, ours, 2e-4)
    assert torch.stack(largest).max() > 100  # exp(89) is infinite in float32


@torch.no_grad()
def test_steps_of_the_published_class(tmp_path: Path) -> None:
    """One row at a time: its steps are broken for several."""
    theirs, tokens = model(attention_hidden_size=32), oracle.ids(1, 40)
    folder = oracle.save(theirs, tmp_path / "m")
    state, logits = None, []
    for token in tokens.split(1, dim=1):
        output = theirs(token, state=state, use_cache=True)
        state = output.state
        logits.append(output.logits)
    oracle.near(torch.cat(logits, 1), oracle.full(theirs, tokens), 1e-5, "the oracle's own")
    assert convert(folder, tmp_path / "own").layers == ("rwkv4",) * 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon is 0.001; supported: 1e-05"),
        ({"head_size": 8}, "'head_size', which this family does not know"),
        ({"attention_hidden_size": 32}, r"decay would have shape \[40\], the config makes it"),
        ({"num_hidden_layers": 1}, r"holds rwkv\.blocks\.1\.attention\.key\.weight"),
        ({"tie_word_embeddings": True}, r"head\.weight is not rwkv\.embeddings\.weight"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = oracle.save(model(), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")


@pytest.mark.parametrize(
    "name, message",
    [
        ("blocks.1.ffn.extra.weight", r"extra\.weight, which its config does not account for"),
        ("blocks.0.att.ln_x.weight", r"no config\.json, and its tensors are of no family"),
    ],
    ids=["stray", "RWKV-5"],
)
def test_other_files_of_the_authors_are_refused(tmp_path: Path, name: str, message: str) -> None:
    folder = save_pth(model(), tmp_path / "m")
    path = folder / "model.pth"
    torch.save({**torch.load(path), name: torch.ones(3)}, path)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")
