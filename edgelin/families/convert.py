"""From a foreign checkpoint folder to one of ours, a tensor at a time."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgelin import checkpoint as checkpoints
from edgelin import families
from edgelin.config import from_dict, to_dict
from edgelin.errors import EdgelinError
from edgelin.families import tokenizers
from edgelin.families.reading import Fields, Tensors, read_json
from edgelin.files import staging
from edgelin.model import SequenceModel
from edgelin.model_config import ModelConfig

SHARD_BYTES = 256 << 20  # what is held at a time
_TEMPORARY_SHARD_BYTES = 64 << 20
Progress = Callable[[int, int], Any]


def convert(
    folder: str | Path,
    out: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda count, total: None,
) -> ModelConfig:
    """Write a foreign checkpoint in our own format.

    Args:
        folder: Local folder in the Hugging Face shape, or with a ``.pth`` file of RWKV.
        out: Folder to fill; made if missing.
        shard_bytes: Largest content of a weight file, and what is held at a time.
        progress: Is told the numbers of every tensor that is written, and those of all.

    Returns:
        The model's sizes.

    Raises:
        EdgelinError: No family reads it, or something in it is not understood.
    """
    folder, out = Path(folder), Path(out)
    values, where = _config(folder)
    if values.get("quantization_config") is not None:
        raise EdgelinError(
            f"{folder} is a quantised checkpoint (quantization_config); take the one in bfloat16, "
            f"float16 or float32, `edgelin export` quantises it"
        )
    family = families.find(values, where)
    fields = Fields(values, where)
    config, weights = _read(family, fields)
    fields.finish()
    tensors = Tensors(folder, getattr(family, "SKIP", r"(?!)"))
    checkpoints.write(out, config, _checked(config, tensors, weights, progress), shard_bytes)
    tensors.finish()
    tokenizers.convert(folder, out, values, config.vocab_size)
    return config


def import_folder(
    folder: Path, out: Path, *, progress: Progress = lambda count, total: None
) -> ModelConfig:
    """:func:`convert` into a new folder, which is there whole or not at all.

    Raises:
        EdgelinError: As :func:`convert`; ``out`` exists, or ``folder`` is a checkpoint of ours.
    """
    if os.path.lexists(out):
        raise EdgelinError(f"{out} exists; choose another --out")
    _check_folder(folder)
    if _is_ours(folder):
        raise EdgelinError(f"{folder} is a checkpoint of edgelin already; use it as it is")
    with staging(out) as part:
        config = convert(folder, part, progress=progress)
        part.rename(out)
    return config


@contextlib.contextmanager
def own(folder: Path) -> Iterator[Path]:
    """The folder itself if it is a checkpoint of ours, else a temporary one converted from it.

    Raises:
        EdgelinError: As :func:`convert`, or there is no tokenizer.
    """
    _check_folder(folder)
    bare = not (folder / "config.json").is_file() and not list(folder.glob("*.pth"))
    if bare or _is_ours(folder):
        yield folder  # what is wrong with it, reading it as ours will say
        return
    with tempfile.TemporaryDirectory(prefix="edgelin-") as temporary:
        convert(folder, temporary, shard_bytes=_TEMPORARY_SHARD_BYTES)
        if not (Path(temporary) / "tokenizer.json").is_file():
            raise EdgelinError(
                f"{folder} has no tokenizer; add the model's tokenizer.json, tokenizer.model or "
                f"rwkv_vocab_v20230424.txt"
            )
        try:
            yield Path(temporary)
        except EdgelinError as error:  # a user knows nothing of the temporary one
            raise EdgelinError(str(error).replace(temporary, str(folder))) from error


def _check_folder(folder: Path) -> None:
    """Refuse a file: what belongs to it, such as a vocabulary, lies beside it."""
    if folder.is_file():
        raise EdgelinError(f"{folder} is a file; give the folder that it lies in")


def _read(family: Any, fields: Fields) -> tuple[ModelConfig, Callable[..., Any]]:
    """What a family makes of a config, whose values may be of any type."""
    try:
        config, weights = family.read(fields)
        config = from_dict(ModelConfig, to_dict(config), fields.where)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EdgelinError(
            f"{fields.where}: a value is of the wrong type or out of range ({reason}); copy the "
            f"checkpoint again"
        ) from error
    return config, weights


def _is_ours(folder: Path) -> bool:
    """Whether a folder's config names our own format."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("model_type") == checkpoints.MODEL_TYPE


def _config(folder: Path) -> tuple[dict[str, Any], str]:
    """The keys of ``config.json`` and where they are from: its path, or that of a ``.pth`` file.

    Raises:
        EdgelinError: There is none, or several files without one.
    """
    path, files = folder / "config.json", sorted(folder.glob("*.pth"))
    if path.is_file() or not files:
        return read_json(path), str(path)
    if len(files) > 1:
        raise EdgelinError(
            f"{folder} has several .pth files and no config.json; keep one model in a folder: "
            f"{', '.join(file.name for file in files[:3])}"
        )
    return families.describe(Tensors(folder)), str(files[0])


def _checked(
    config: ModelConfig,
    tensors: Tensors,
    weights: Callable[[Tensors], Iterator[tuple[str, Tensor]]],
    progress: Progress,
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the model, each once and in its shape."""
    with torch.device("meta"):
        needed = {n: t.shape for n, t in checkpoints.own_tensors(SequenceModel(config)).items()}
    total = sum(shape.numel() for shape in needed.values())
    for name, tensor in weights(tensors):
        if name not in needed:
            raise RuntimeError(f"the family yields {name}, which the model has not (or twice)")
        if tensor.shape != needed[name]:
            raise EdgelinError(
                f"{tensors.where}: of {', '.join(tensors.last[:3])}, {name} would have shape "
                f"{list(tensor.shape)}, the config makes it {list(needed[name])}; config.json and "
                f"the weights do not belong together"
            )
        tensors.last.clear()
        del needed[name]
        yield name, tensor.contiguous()
        progress(tensor.numel(), total)
    if needed:
        raise RuntimeError(f"the family yields no {', '.join(sorted(needed)[:3])}")


__all__ = ["convert", "import_folder", "own", "read_json"]
