"""Checkpoint folders: exact round trips, and one line for everything that can be wrong."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgelin import checkpoint, tokenizer
from edgelin.config import FeatureConfig, ModelConfig
from edgelin.errors import EdgelinError
from edgelin.model import SequenceModel


def _config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 24,
        "layers": ("gdn",),
        "mixers": {"gdn": {"type": "gated_deltanet", "num_heads": 1, "key_dim": 8, "value_dim": 4}},
    }
    return ModelConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    return str(tokenizer.train(["a text <|end|> to read"], 300).to_str())


@pytest.fixture
def folder(tmp_path: Path, tokenizer_json: str) -> Path:
    torch.manual_seed(0)
    checkpoint.save(tmp_path / "model", SequenceModel(_config()), tokenizer_json)
    return tmp_path / "model"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_round_trip(
    tmp_path: Path, tokenizer_json: str, tied: bool, dtype: torch.dtype | None
) -> None:
    config = _config(tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = SequenceModel(config)
    checkpoint.save(tmp_path, model, tokenizer_json, dtype)
    again, read = checkpoint.load(tmp_path)
    assert read == config == checkpoint.read_config(tmp_path)
    assert not again.training
    assert model.state_dict().keys() == again.state_dict().keys()
    for name, tensor in model.state_dict().items():
        want = tensor.to(dtype or tensor.dtype).float()
        assert torch.equal(again.state_dict()[name], want), name
    stored = load_file(tmp_path / "model.safetensors")
    assert ("head.weight" in stored) != tied
    assert {t.dtype for t in stored.values()} == {dtype or torch.float32}
    half, _ = checkpoint.load(tmp_path, dtype=torch.bfloat16)
    assert half.embedding.weight.dtype == torch.bfloat16


def test_shards_hold_the_same_weights(tmp_path: Path, tokenizer_json: str) -> None:
    torch.manual_seed(0)
    model = SequenceModel(_config())
    checkpoint.save(tmp_path, model, tokenizer_json, shard_bytes=3000)
    files = checkpoint.weight_files(tmp_path)
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    again, _ = checkpoint.load(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name

    other = load_file(files[1]) | {"norm.weight": torch.zeros(16)}
    save_file(other, files[1])
    with pytest.raises(EdgelinError, match=r"holds norm\.weight, which model-0000\d-of"):
        checkpoint.load(tmp_path)
    files[1].unlink()
    with pytest.raises(EdgelinError, match=f"{files[1].name}, which model.safetensors.index.json"):
        checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, model, tokenizer_json)
    assert [f.name for f in checkpoint.weight_files(tmp_path)] == ["model.safetensors"]
    assert [f.name for f in tmp_path.glob("*safetensors*")] == ["model.safetensors"]


def test_a_shared_tensor_is_stored_once(tmp_path: Path) -> None:
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    assert list(checkpoint.own_tensors(module)) == ["a.weight", "a.bias", "b.bias"]


def test_files_have_the_hugging_face_shape(folder: Path, tokenizer_json: str) -> None:
    names = "config.json generation_config.json model.safetensors tokenizer.json"
    assert sorted(p.name for p in folder.iterdir()) == [*names.split(), "tokenizer_config.json"]
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "edgelin"
    assert config["architectures"] == ["EdgelinForCausalLM"]
    assert config["format"] == 1
    assert config["hidden_size"] == 16
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"
    assert (folder / "tokenizer.json").read_text() == tokenizer_json


def test_a_model_of_features_has_no_tokenizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SequenceModel(_config(vocab_size=0, features=FeatureConfig(5, 3, labels=tuple("abc"))))
    model.embedding.mean.copy_(torch.arange(5))
    checkpoint.save(tmp_path, model, None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["EdgelinForFeatures"]
    assert (config["vocab_size"], config["features"]["size"]) == (0, 5)
    again, read = checkpoint.load(tmp_path)
    assert read == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_failed_save_leaves_the_old_weights(
    folder: Path, tokenizer_json: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "model.safetensors").read_bytes()

    def crash(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(folder, SequenceModel(_config()), tokenizer_json)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


def _config_json(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(values))

    return change


def _weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


_NEXT = "give the folder that `edgelin train` wrote, or copy it again"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "config.json").unlink(),
            f"{{f}} is no checkpoint: it has no config.json; {_NEXT}",
        ),
        (
            lambda f: (f / "model.safetensors").unlink(),
            f"{{f}} is no checkpoint: it has no model.safetensors; {_NEXT}",
        ),
        (
            _config_json(model_type="llama"),
            "{f}/config.json is of model_type 'llama'; supported is 'edgelin', which "
            "`edgelin import` makes of other projects' checkpoints",
        ),
        (
            _config_json(format=2),
            "{f}/config.json has format 2, this edgelin reads 1; update edgelin, or convert the "
            "checkpoint",
        ),
        (
            _config_json(hidden_sise=3),
            "{f}/config.json has an unknown key 'hidden_sise'; did you mean 'hidden_size'?",
        ),
        (
            _weights(lambda t: t.update({"norm.weight": torch.zeros(3)})),
            "{f}/model.safetensors: norm.weight has shape [3], config.json makes it [16]; "
            "the two files do not belong together",
        ),
        (
            _weights(lambda t: t.update({"norm.weight": torch.ones(16, dtype=torch.int8)})),
            "{f}/model.safetensors: norm.weight is I8; allowed: F64, F32, F16, BF16; take the "
            "checkpoint that is not quantised",
        ),
        (
            _config_json(vocab_size=256),
            "{f}/tokenizer.json has token id 265, the model's vocab_size is 256; take the "
            "tokenizer.json that the model was trained with",
        ),
        (
            _weights(lambda t: t.pop("norm.weight")),  # type: ignore[arg-type, return-value]
            "{f}/model.safetensors lacks norm.weight; config.json does not belong to it",
        ),
        (
            _weights(lambda t: t.update({f"x{i}": torch.zeros(1) for i in range(5)})),
            "{f}/model.safetensors holds x0, x1, x2 and 2 more, which the model of config.json "
            "has not; config.json does not belong to it",
        ),
    ],
)
def test_errors(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(EdgelinError) as error:
        checkpoint.load(folder)
    assert str(error.value) == message.format(f=folder)


@pytest.mark.parametrize("damage", [_cut, lambda f: (f / "model.safetensors").write_bytes(b"")])
def test_damaged_weights(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    with pytest.raises(EdgelinError, match=r"model\.safetensors is damaged: .*; copy or train it"):
        checkpoint.load(folder)


@pytest.mark.parametrize("content", ["{", "[]", '"x"', "\udcff"])
def test_damaged_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(EdgelinError, match=r"config\.json (cannot be read|is of model_type None)"):
        checkpoint.load(folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(EdgelinError) as error:
        checkpoint.read_config(tmp_path / "none")
    assert str(error.value) == (
        f"there is no checkpoint folder {tmp_path}/none; `edgelin train` writes one"
    )


def test_a_gap_in_the_token_ids_does_not_hide_a_large_one(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 300
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(EdgelinError, match="has token id 300, the model's vocab_size is 300"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "places", [{"a": 5}, {"a": 5, "b": "x"}, {"a": None}, {"a": ["x"]}, {"a": "../x"}, 5, None]
)
def test_damaged_index(folder: Path, places: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(EdgelinError, match=r"index\.json is damaged: .*; copy the"):
        checkpoint.load(folder)


@pytest.mark.parametrize("mixers", [5, [1], {"gdn": 5}, {"gdn": None}, {"gdn": {"type": 5}}])
def test_mixers_that_are_no_tables(folder: Path, mixers: Any) -> None:
    _config_json(mixers=mixers)(folder)
    with pytest.raises(EdgelinError, match=r"mixers.* is .*(needed|give the name of a mixer)"):
        checkpoint.load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_forbidden_file_is_not_called_damaged(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def forbid(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", forbid)  # root may read every file
    with pytest.raises(EdgelinError) as error:
        checkpoint.load(folder)
    assert str(error.value).startswith(f"{folder / name} cannot be read: Permission denied; ")


def test_files_have_the_mode_of_the_umask(tmp_path: Path, tokenizer_json: str) -> None:
    before = os.umask(0o022)
    try:
        checkpoint.save(tmp_path, SequenceModel(_config()), tokenizer_json)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}
