"""Keys and tensors of a foreign checkpoint, each of which must be used or named as harmless."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from edgelin.errors import EdgelinError

_REQUIRED = object()
# Keys of every transformers config that say nothing of the forward pass of a trained model.
_HARMLESS = (
    r"_.*|architectures|auto_map|model_type|transformers_version|torch_dtype|dtype|use_cache|"
    r"(bos|eos|pad|sep|decoder_start|image|video|vision_start|vision_end|audio)_token_id|"
    r"initializer_range|initializer_factor|.*_dropout|dropout|max_position_embeddings|"
    r"is_decoder|is_encoder_decoder|return_dict.*|output_.*|chunk_size_feed_forward|"
    r"problem_type|id2label|label2id|tokenizer_class|prefix|finetuning_task|task_specific_params|"
    r"torchscript|pruned_heads|use_bfloat16|cross_attention_hidden_size|add_cross_attention|"
    r"tie_encoder_decoder|remove_invalid_values|num_logits_to_keep|language_model_only"
)
_INDEX = "model.safetensors.index.json"
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LAYERS = ("num_hidden_layers", "num_blocks")
_MOST_LAYERS = 1024


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a bare Infinity, which hub files have, is one.

    Raises:
        EdgelinError: It cannot be read, or is no object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EdgelinError(f"{path} cannot be read: {reason}; copy the checkpoint again") from error
    if not isinstance(values, dict):
        raise EdgelinError(f"{path} is no JSON object; copy the checkpoint again")
    return values


class Fields:
    """The keys of a ``config.json``.

    Args:
        values: The parsed JSON.
        where: Its path, for errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = dict(values), where
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the key is there and null, where that says something."""
        return name in self._values and self._values[name] is None

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value of a key; a missing or null one is the default.

        Raises:
            EdgelinError: There is neither the key nor a default.
        """
        self._taken.add(name)
        value = self._values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise EdgelinError(f"{self.where} lacks the key {name!r}, which this family needs")
            return default
        if name in _LAYERS and not (isinstance(value, int) and 1 <= value <= _MOST_LAYERS):
            raise EdgelinError(f"{self.where}: {name} is {value!r}; allowed: 1 .. {_MOST_LAYERS}")
        return _plain(value)

    def first(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The value of the first of these keys that is there: spellings of one thing."""
        self._taken.update(names)
        for name in names:
            if self.has(name):
                return self.take(name)
        return self.take(names[0], default)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse a key whose value is none of those that this family computes; absent is fine.

        Raises:
            EdgelinError: With the key, its value and what is supported.
        """
        value = self.take(name, None)
        if value is not None and value not in allowed:
            shown = ", ".join(repr(a) for a in allowed) or "nothing"
            raise EdgelinError(f"{self.where}: {name} is {value!r}; supported: {shown}")

    def nested(self, name: str) -> Fields:
        """A table inside, to be finished on its own."""
        value = self.take(name)
        if not isinstance(value, Mapping):
            raise EdgelinError(f"{self.where}: {name} is {value!r}; a table is needed")
        return Fields(value, f"{self.where}: {name}")

    def ignore(self, *names: str) -> None:
        """Name keys that do not change the numbers."""
        self._taken.update(names)

    def finish(self) -> None:
        """Refuse keys that nothing has taken: they might change the numbers.

        Raises:
            EdgelinError: With their names.
        """
        left = [
            name
            for name, value in self._values.items()
            if name not in self._taken and value is not None and not re.fullmatch(_HARMLESS, name)
        ]
        if left:
            raise EdgelinError(
                f"{self.where} has {', '.join(map(repr, sorted(left)))}, which this family does "
                f"not know and which may change the numbers; the checkpoint is not converted"
            )


class Tensors:
    """The tensors of a checkpoint folder, read one at a time.

    Args:
        folder: Holds safetensors files (one or shards), or PyTorch's ``.bin`` or ``.pth``.
        skip: Regular expression of names that are no part of the model.
    """

    def __init__(self, folder: Path, skip: str = r"(?!)") -> None:
        self._skip = re.compile(skip)
        self._readers = _readers(folder)
        self._taken: set[str] = set()
        self.where = str(folder)
        self.last: list[str] = []  # names read since someone cleared it

    @property
    def names(self) -> list[str]:
        """All names in the files."""
        return list(self._readers)

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._readers

    def __call__(self, name: str) -> Tensor:
        """Read a tensor in the type that it is stored in.

        Raises:
            EdgelinError: It is missing, of a type that no family reads, or not finite.
        """
        if name not in self._readers:
            raise EdgelinError(f"{self.where} lacks the tensor {name}, which its config needs")
        self._taken.add(name)
        self.last.append(name)
        tensor = self._readers[name]()
        if tensor.dtype not in _NUMBERS:
            raise EdgelinError(
                f"{self.where}: {name} is {str(tensor.dtype).removeprefix('torch.')}; take the "
                f"checkpoint, not quantised, in bfloat16, float16 or float32"
            )
        if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):
            raise EdgelinError(
                f"{self.where}: {name} holds NaN or infinite numbers; copy the checkpoint again"
            )
        return tensor

    def full(self, name: str) -> Tensor:
        """Read a tensor in float32: what is to be computed with."""
        return self(name).float()

    def ignore(self, name: str) -> None:
        """Name a tensor that does not change the numbers, such as a copy of a tied one."""
        self._taken.add(name)

    def finish(self) -> None:
        """Refuse tensors that nothing has taken.

        Raises:
            EdgelinError: With the first names.
        """
        left = sorted(n for n in set(self._readers) - self._taken if not self._skip.search(n))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise EdgelinError(
                f"{self.where} holds {', '.join(left[:3])}{more}, which its config does not "
                f"account for; the checkpoint is not converted"
            )


def _plain(value: Any) -> Any:
    """A value with transformers' ``{"__float__": "Infinity"}`` turned into numbers."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(value["__float__"])
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _readers(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Name to a function that reads the tensor."""
    found: dict[str, Callable[[], Tensor]] = {}
    path = folder
    try:
        for path in _files(folder):
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    found |= {key: _lazily(path, key) for key in file.keys()}  # noqa: SIM118
            else:
                found |= {key: _held(value) for key, value in _pickled(path).items()}
    except EdgelinError:
        raise
    except SafetensorError as error:
        raise EdgelinError(f"{path} is damaged: {error}; copy it again") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise EdgelinError(f"{path} cannot be read: {reason}; copy it again") from error
    return found


def _pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of ``torch.save``; no code in it is run."""
    # Files of the format before torch 1.6 are no zip archives and cannot be mapped.
    mapped = zipfile.is_zipfile(path)
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise EdgelinError(
            f"{path} is damaged, or holds objects besides tensors, whose code is never run; take "
            f"the checkpoint in safetensors"
        ) from error
    tensors = isinstance(values, dict) and all(isinstance(v, Tensor) for v in values.values())
    if not tensors:
        inside = ", ".join(map(repr, list(values)[:3])) if isinstance(values, dict) else "no names"
        raise EdgelinError(
            f"{path} is no dictionary of tensors (it has {inside}); save the model's state_dict"
        )
    found: dict[str, Tensor] = values
    return found


def _held(tensor: Tensor) -> Callable[[], Tensor]:
    """A reader of a tensor that is there already."""
    return lambda: tensor


def _lazily(path: Path, key: str) -> Callable[[], Tensor]:
    """A reader of one tensor. An open file would keep all that was read of it in memory."""

    def read() -> Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    return read


def _files(folder: Path) -> list[Path]:
    """The weight files of a folder: the safetensors if there are any."""
    index = folder / _INDEX
    if index.is_file():
        names = _shards(index)
        if odd := [name for name in names if Path(name).name != name]:
            raise EdgelinError(f"{index} names {odd[0]!r}, which is no file name; copy it again")
        return [folder / name for name in names]
    for pattern in ("*.safetensors", "pytorch_model*.bin", "*.pth"):
        if found := sorted(folder.glob(pattern)):
            return found
    raise EdgelinError(
        f"{folder} holds no weights; it needs model.safetensors, pytorch_model.bin or a .pth file"
    )


def _shards(index: Path) -> list[str]:
    """The files that an index names."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(n, str) for n in table.values()):
        raise EdgelinError(f"{index} has no table weight_map of tensors and files; copy it again")
    return sorted(set(table.values()))


__all__ = ["Fields", "Tensors", "read_json"]
