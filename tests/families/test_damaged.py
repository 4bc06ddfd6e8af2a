"""Foreign checkpoints that are damaged, or are none: each gets one clear line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_mamba2 import model

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert, import_folder, own

A_LOG = "backbone.layers.0.mixer.A_log"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return oracle.save(model(), tmp_path / "m")


def weights(folder: Path, values: Any, **options: Any) -> None:
    """Put a file of torch.save in the place of the safetensors."""
    (folder / "model.safetensors").unlink()
    torch.save(values, folder / "pytorch_model.bin", **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "a value is of the wrong type or out of range"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0; int is needed"),
        ({"time_step_limit": ["a", 1]}, "a value is of the wrong type"),
        ({"time_step_limit": [0.1, 1, 2]}, "a value is of the wrong type"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000; allowed: 1 \.\. 1024"),
        ({"eos_token_id": ["a"]}, "eos_token_id 'a' is no integer"),
        ({"eos_token_id": oracle.VOCABULARY}, r"is beyond the \d+ tokens of the model"),
        ({"quantization_config": {"bits": 4}}, "is a quantised checkpoint"),
    ],
    ids=str,
)
def test_keys(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.to(torch.complex64), f"{A_LOG} is complex64; take"),
        (lambda a: a > 0, f"{A_LOG} is bool; take"),
        (lambda a: a.to(torch.int8), f"{A_LOG} is int8; take"),
        (lambda a: a.where(a == a.max(), torch.nan), f"{A_LOG} holds NaN or infinite"),
        (lambda a: a.bfloat16() * torch.inf, f"{A_LOG} holds NaN or infinite"),
    ],
    ids=["complex", "bool", "int8", "nan", "inf"],
)
def test_tensors(
    folder: Path, tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    found = load_file(folder / "model.safetensors")[A_LOG]
    oracle.add_tensors(folder, {A_LOG: change(found)})
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[: len(content) // 2], "is damaged"),
        (lambda content: content[:100], "is damaged"),
        (lambda content: content[:4], "is damaged"),
        (lambda content: b"", "is damaged"),
    ],
    ids=["half", "in the header", "in its length", "empty"],
)
def test_half_written(
    folder: Path, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(EdgelinError, match=message):
        import_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["transposed", "cut", "missing"])
def test_one_wrong_tensor(folder: Path, tmp_path: Path, change: str) -> None:
    """Every matrix of a layer in turn; each is named."""
    whole = load_file(folder / "model.safetensors")
    names = [n for n, t in whole.items() if t.dim() == 2 and t.shape[0] != t.shape[1]]
    assert len(names) > 3
    for name in names:
        values = dict(whole)
        matrix = values.pop(name)
        if change != "missing":
            cut = matrix[:-1] if change == "cut" else matrix.T
            values[name] = cut.contiguous()
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(EdgelinError, match=name.rpartition(".")[0]) as caught:
            import_folder(folder, tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_files_of_pickles(folder: Path, tmp_path: Path) -> None:
    values = load_file(folder / "model.safetensors")
    weights(folder, values, _use_new_zipfile_serialization=False)
    convert(folder, tmp_path / "old")
    for wrong, message in (
        ({"state_dict": values}, r"no dictionary of tensors \(it has 'state_dict'\)"),
        (list(values.values()), "no dictionary of tensors"),
        ({"code": Path("x")}, "whose code is never run"),
    ):
        torch.save(wrong, folder / "pytorch_model.bin")
        with pytest.raises(EdgelinError, match=message):
            convert(folder, tmp_path / "out")


@pytest.mark.parametrize("index", [{}, [], {"weight_map": []}, {"weight_map": {"a": 1}}], ids=str)
def test_an_index_that_is_none(folder: Path, tmp_path: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EdgelinError, match=r"index\.json (has no table|is no JSON object)"):
        convert(folder, tmp_path / "out")


def test_a_template_that_is_no_text(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": {"a": 1}}')
    with pytest.raises(EdgelinError, match="chat_template is dict, not a text"):
        convert(folder, tmp_path / "out")


def test_what_is_harmless(folder: Path, tmp_path: Path) -> None:
    oracle.rewrite(folder, quantization_config=None)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text, encoding="utf-8-sig")
    convert(folder, tmp_path / "out")


def test_a_file_is_no_folder(folder: Path, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    with pytest.raises(EdgelinError, match="is a file; give the folder"):
        import_folder(file, tmp_path / "out")
    with pytest.raises(EdgelinError, match="is a file; give the folder"), own(file):
        pass


def test_errors_name_the_folder_of_the_user(folder: Path) -> None:
    with pytest.raises(EdgelinError, match=f"^{folder}: too deep$"), own(folder) as temporary:
        raise EdgelinError(f"{temporary}: too deep")
