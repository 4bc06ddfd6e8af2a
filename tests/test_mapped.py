"""Arrays in a mapped file, and models whose parameters lie in one."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from edgelin import checkpoint, mapped
from edgelin.config import ModelConfig
from edgelin.mapped import MappedFile
from edgelin.model import SequenceModel

LARGE = (300, 1000)  # of float32: more than is worth a mapping


def test_arrays_keep_their_content(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    shapes = [(3,), LARGE, (), (0, 5), (7, *LARGE)]
    with MappedFile(tmp_path) as file:
        arrays = [file.empty(shape, np.float32) for shape in shapes]
        bytes_too = file.empty((1 << 17,), np.uint8)
    contents = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    for array, content in zip(arrays, contents, strict=True):
        array[...] = content
    bytes_too[...] = 7
    mapped.release()
    for array, content in zip(arrays, contents, strict=True):
        assert array.shape == content.shape and array.dtype == np.float32
        np.testing.assert_array_equal(array, content)
    assert (bytes_too == 7).all()
    assert list(tmp_path.iterdir()) == []  # the file has no name


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="the system has no such call")
def test_release_takes_pages_out_of_memory(tmp_path: Path) -> None:
    process = psutil.Process()
    with MappedFile(tmp_path) as file:
        array = file.empty((1 << 26,), np.uint8)
    before = process.memory_info().rss
    array[...] = 1
    full = process.memory_info().rss - before
    mapped.release()
    left = process.memory_info().rss - before
    assert full > 0.9 * array.nbytes and left < 0.1 * array.nbytes
    assert array.sum() == array.size


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with MappedFile(tmp_path) as file:
        monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
        with pytest.raises(OSError, match="No space"):
            file.empty(LARGE, np.float32)


def test_space_is_kept_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with MappedFile(tmp_path) as file:
        one, two = file.empty(LARGE, np.float32), file.empty(LARGE, np.float32)
    one[...], two[...] = 1, 2
    assert (one == 1).all() and (two == 2).all()


def _model(**changes: Any) -> SequenceModel:
    """Parameters of every kind: drawn, tied, followed, and buffers with and without a name."""
    torch.manual_seed(0)
    favor = {"type": "linear_attention", "num_heads": 2, "key_dim": 16, "value_dim": 16}
    mixers = {
        "favor": favor | {"feature_map": "favor"},
        "taylor": favor | {"feature_map": "taylor"},
        "rwkv7": {
            "type": "rwkv7",
            "num_heads": 2,
            "key_dim": 16,
            "value_dim": 16,
            "decay_rank": 8,
            "beta_rank": 8,
            "value_rank": 8,
            "gate_rank": 8,
        },
    }
    sizes = {
        "vocab_size": 2000, "hidden_size": 32, "intermediate_size": 48, "mixers": mixers,
        "layers": ("rwkv7", "favor", "taylor", "rwkv7"),
    }  # fmt: skip
    return SequenceModel(ModelConfig(**{**sizes, **changes})).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mapped_models_are_the_same(
    tied: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a tensor is read in pieces, with a rest."""
    monkeypatch.setattr(checkpoint, "_PIECE_BYTES", 7000)
    model = _model(tie_word_embeddings=tied)
    checkpoint.save(tmp_path / "saved", model, None, dtype)
    plain, config = checkpoint.load(tmp_path / "saved")
    with MappedFile(tmp_path) as file:
        found, same = checkpoint.load(tmp_path / "saved", mapped=file)
    assert same == config
    names = list(checkpoint.own_tensors(model))
    assert list(checkpoint.own_tensors(found)) == names
    for (name, one), two in zip(
        plain.state_dict().items(), found.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name
        if one.is_floating_point():
            assert torch.equal(model.state_dict()[name].to(dtype).to(one.dtype), one), name
    ids = torch.randint(2000, (1, 20))
    with torch.no_grad():
        assert torch.equal(plain(ids)[0], found(ids)[0])
        mapped.release()
        assert torch.equal(plain(ids)[0], found(ids)[0])
