"""Checkpoint folders in the Hugging Face shape.

``config.json`` (the model's sizes under ``"model_type": "edgelin"``), ``model.safetensors`` or
shards ``model-00001-of-0000N.safetensors`` with ``model.safetensors.index.json`` (every tensor
once: a tied head is not stored) and, for text, ``tokenizer.json``, ``tokenizer_config.json`` and
``generation_config.json``. Files are replaced one by one, each atomically, the weights last.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from edgelin import tokenizer as tokenizers
from edgelin.config import ModelConfig, from_dict, to_dict
from edgelin.errors import EdgelinError
from edgelin.files import replacing
from edgelin.mapped import MappedFile, release
from edgelin.model import SequenceModel

MODEL_TYPE = "edgelin"
CHAT_TEMPLATE = "chat_template.jinja"
FORMAT = 1
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_PIECE_BYTES = 1 << 26  # read at a time
_ARCHITECTURES = {False: "EdgelinForCausalLM", True: "EdgelinForFeatures"}
_HEADER = {"model_type", "architectures", "format"}
_NEXT = "give the folder that `edgelin train` wrote, or copy it again"


def save(
    folder: str | Path,
    model: SequenceModel,
    tokenizer_json: str | None,
    dtype: torch.dtype | None = None,
    *,
    shard_bytes: int | None = None,
) -> None:
    """Write a checkpoint folder.

    Args:
        folder: Made if missing; files of an earlier checkpoint in it are replaced.
        model: The model; it carries its ``config``.
        tokenizer_json: Content of ``tokenizer.json``; None for a model of features.
        dtype: Of the stored floating-point tensors; None keeps the model's.
        shard_bytes: Largest content of a weight file; None writes one file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer_json is not None:
        tokenizer = tokenizers.parse(tokenizer_json, folder / "tokenizer.json")
        _write_tokenizer(folder, tokenizer, tokenizer_json)
    tensors = (
        (key, value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous())
        for key, value in own_tensors(model).items()
    )
    write(folder, model.config, tensors, shard_bytes)


def write(
    folder: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    shard_bytes: int | None = None,
) -> None:
    """Write ``config.json`` and the weights, which are held a shard at a time.

    Args:
        folder: Made if missing.
        config: The model's sizes.
        tensors: Name and content, in the order of the files.
        shard_bytes: As of :func:`save`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header = {
        "model_type": MODEL_TYPE,
        "architectures": [_ARCHITECTURES[config.features is not None]],
        "format": FORMAT,
    }
    _write_json(folder / "config.json", header | to_dict(config))
    _write_weights(folder, tensors, shard_bytes)


def _write_tokenizer(folder: Path, tokenizer: tokenizers.Tokenizer, content: str) -> None:
    """The three files that a checkpoint of a language model has besides.

    Where the tokenizer stands already, it keeps what came with it, such as more end tokens.
    """
    path = folder / "tokenizer.json"
    if path.is_file() and tokenizers.load(path).to_str() == tokenizer.to_str():
        return
    end = tokenizers.end_token_id(tokenizer)
    name = tokenizer.id_to_token(end)
    with replacing(path) as part:
        part.write_text(content, encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": name,
            "eos_token": name,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})


def load(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    mapped: MappedFile | None = None,
) -> tuple[SequenceModel, ModelConfig]:
    """Read a checkpoint folder; the model comes in evaluation mode.

    Args:
        folder: Written by :func:`save`.
        device: Where the model is put.
        dtype: Of its parameters; None is float32, whatever the file holds.
        mapped: Where the parameters lie, so that they are not in memory unless they are used.

    Raises:
        EdgelinError: A file is missing, damaged, of another architecture, or does not fit.
    """
    folder = Path(folder)
    config = read_config(folder)
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        # Ids may have gaps, so that their number says nothing.
        largest = tokenizers.largest_id(tokenizers.load(tokenizer))
        if largest >= config.vocab_size:
            raise EdgelinError(
                f"{tokenizer} has token id {largest}, the model's vocab_size is "
                f"{config.vocab_size}; take the tokenizer.json that the model was trained with"
            )
    model = SequenceModel(config) if mapped is None else _mapped_model(config, mapped)
    fill(model, folder)
    return model.to(device=device, dtype=dtype).eval(), config


def _mapped_model(config: ModelConfig, file: MappedFile) -> SequenceModel:
    """A model whose parameters lie in a mapped file, with no values yet."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)
    try:
        model = SequenceModel(config)  # initial values of no memory take no time
    finally:
        hook.remove()
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                values = torch.from_numpy(file.empty(tuple(parameter.shape), np.float32))
                made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
    return model


def read_config(folder: str | Path) -> ModelConfig:
    """Read ``config.json`` of a checkpoint folder.

    Raises:
        EdgelinError: The folder or file is missing, damaged, or of another architecture.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise EdgelinError(f"there is no checkpoint folder {folder}; `edgelin train` writes one")
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise EdgelinError(f"{folder} is no checkpoint: it has no config.json; {_NEXT}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EdgelinError(f"{path} cannot be read: {reason}; {_NEXT}") from error
    found = values.get("model_type") if isinstance(values, dict) else None
    if found != MODEL_TYPE:
        raise EdgelinError(
            f"{path} is of model_type {found!r}; supported is {MODEL_TYPE!r}, which "
            f"`edgelin import` makes of other projects' checkpoints"
        )
    if values.get("format") != FORMAT:
        raise EdgelinError(
            f"{path} has format {values.get('format')!r}, this edgelin reads {FORMAT}; "
            f"update edgelin, or convert the checkpoint"
        )
    fields = {key: value for key, value in values.items() if key not in _HEADER}
    return from_dict(ModelConfig, fields, str(path))


def own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each tensor once."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: state[name] for name in first.values()}


def weight_files(folder: str | Path) -> list[Path]:
    """The files that hold the weights of a checkpoint folder, in order.

    Raises:
        EdgelinError: There are none, or the index is damaged.
    """
    folder = Path(folder)
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _WEIGHTS).is_file():
            raise EdgelinError(f"{folder} is no checkpoint: it has no {_WEIGHTS}; {_NEXT}")
        return [folder / _WEIGHTS]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        # A path would lead out of the checkpoint.
        if odd := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{odd[0]!r} is no file name")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise EdgelinError(f"{index} is damaged: {error}; copy the checkpoint again") from error
    for name in names:
        if not (folder / name).is_file():
            raise EdgelinError(
                f"{folder} is no checkpoint: it has no {name}, which {_INDEX} names; {_NEXT}"
            )
    return [folder / name for name in names]


def _write_weights(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int | None
) -> None:
    """One file, or shards and their index; files of the other kind are removed last."""
    places: dict[str, int] = {}
    shard: dict[str, torch.Tensor] = {}
    total = count = 0
    with tempfile.TemporaryDirectory(dir=folder, prefix=".weights-") as parts:
        for name, tensor in tensors:
            filled = sum(t.nbytes for t in shard.values())
            if shard_bytes is not None and shard and filled + tensor.nbytes > shard_bytes:
                save_file(shard, Path(parts, str(count)), metadata={"format": "pt"})
                shard, count = {}, count + 1
            shard[name], places[name] = tensor, count
            total += tensor.nbytes
        save_file(shard, Path(parts, str(count)), metadata={"format": "pt"})
        names = [_WEIGHTS]
        if count:
            names = [f"model-{i:05d}-of-{count + 1:05d}.safetensors" for i in range(1, count + 2)]
        for i, name in enumerate(names):
            with replacing(folder / name) as part:
                os.replace(Path(parts, str(i)), part)
    if count:
        weight_map = {key: names[i] for key, i in places.items()}
        _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    else:
        (folder / _INDEX).unlink(missing_ok=True)
    for path in folder.glob("model*.safetensors"):
        if path.name not in names:
            path.unlink()


def fill(model: SequenceModel, folder: Path) -> None:
    """Copy the stored tensors into the model's, which must have the same names and shapes.

    Raises:
        EdgelinError: A file is missing or damaged, or does not fit.
    """
    own = own_tensors(model)
    found: dict[str, Path] = {}
    path = folder
    try:
        for path in weight_files(folder):
            path.open("rb").close()  # safetensors calls a forbidden file a missing one
            with safe_open(path, framework="pt") as file:
                own_keys = dict.fromkeys(file.keys(), path)
            if twice := sorted(own_keys.keys() & found.keys()):
                raise EdgelinError(
                    f"{path} holds {_listed(twice)}, which {found[twice[0]].name} holds too; "
                    f"copy the checkpoint again"
                )
            found |= own_keys
        _compare(path if len(set(found.values())) == 1 else folder, set(own), set(found))
        for path in dict.fromkeys(found.values()):
            _copy(path, {name: tensor for name, tensor in own.items() if found[name] == path})
    except SafetensorError as error:
        raise EdgelinError(f"{path} is damaged: {error}; copy or train it again") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise EdgelinError(f"{path} cannot be read: {reason}; {_NEXT}") from error


def _copy(path: Path, own: dict[str, torch.Tensor]) -> None:
    """Fill tensors from a file that is opened for each piece: closing it takes it from memory."""
    for name, tensor in own.items():
        with safe_open(path, framework="pt") as file:
            entry = file.get_slice(name)
            stored, dtype = list(entry.get_shape()), entry.get_dtype()
        if stored != list(tensor.shape):
            raise EdgelinError(
                f"{path}: {name} has shape {stored}, config.json makes it "
                f"{list(tensor.shape)}; the two files do not belong together"
            )
        # Codes without their scales would be taken for the numbers that they stand for.
        if tensor.is_floating_point() and dtype not in _FLOATS:
            raise EdgelinError(
                f"{path}: {name} is {dtype}; allowed: {', '.join(_FLOATS)}; take the checkpoint "
                f"that is not quantised"
            )
        for rows in _pieces(tensor):
            with safe_open(path, framework="pt") as file, torch.no_grad():
                tensor[rows].copy_(file.get_slice(name)[rows])
        release()


def _pieces(tensor: torch.Tensor) -> list[Any]:
    """Indices that cut a tensor into pieces along its first axis; ``...`` takes it whole."""
    if tensor.nbytes <= _PIECE_BYTES:
        return [...]
    rows = max(1, _PIECE_BYTES // tensor[0].nbytes)
    return [slice(i, i + rows) for i in range(0, len(tensor), rows)]


def _compare(path: Path, needed: set[str], found: set[str]) -> None:
    if missing := sorted(needed - found):
        raise EdgelinError(f"{path} lacks {_listed(missing)}; config.json does not belong to it")
    if extra := sorted(found - needed):
        raise EdgelinError(
            f"{path} holds {_listed(extra)}, which the model of config.json has not; "
            f"config.json does not belong to it"
        )


def _listed(names: list[str]) -> str:
    """The first names and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
