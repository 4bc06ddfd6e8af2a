"""Frozen descriptions of models and training runs; unknown keys are refused by name.

A model is a list of layers, each the name of a mixer, and a table of mixers::

    [model]
    vocab_size = 8192
    hidden_size = 384
    layers = ["gdn", "gdn", "local"]

    [model.mixers.gdn]
    type = "gated_deltanet"
    num_heads = 6

``type`` names a file of :mod:`edgelin.mixers`; its ``Config`` dataclass reads the other keys. A
model of measurements has a table ``model.features`` in the place of ``vocab_size``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgelin.errors import EdgelinError
from edgelin.model_config import FeatureConfig, ModelConfig, check_range

C = TypeVar("C")

_MOST_STEPS = 99_999_999  # snapshots are named by eight digits
_MOST_SEED = (1 << 31) - 1  # the seed of a step is seed * 2^32 + step, below 2^63


@dataclass(frozen=True)
class DataConfig:
    """Where the text or the features come from.

    Args:
        train: Text files (UTF-8, also .xz or .gz), or .npz files of features, to train on.
        valid: Files likewise for the held-out score, by which the checkpoint to keep is chosen;
            without them the latest is kept.
        tokenizer: An existing ``tokenizer.json``; None trains a byte-level BPE on ``train``.
        cache: Folder for encoded tokens; None is ``cache`` inside the output folder.
        carry_state: Whether every row of the batch reads contiguous text with its recurrent state
            carried from step to step (truncated backpropagation); else windows are shuffled.
    """

    train: tuple[str, ...]
    valid: tuple[str, ...] = ()
    tokenizer: str | None = None
    cache: str | None = None
    carry_state: bool = False

    def __post_init__(self) -> None:
        if not self.train:
            raise EdgelinError("data.train is empty; name at least one file")
        for name in (*self.train, *self.valid, self.tokenizer or "", self.cache or ""):
            if "\0" in name:
                raise EdgelinError(f"data names {name!r}; a path cannot hold a NUL character")


@dataclass(frozen=True)
class OptimConfig:
    """Length, batch and AdamW settings of a run.

    Args:
        batch_size: Sequences a step.
        sequence_length: Tokens a sequence; the most of features, whose windows may be shorter.
        steps: Optimizer steps (None: ``max_seconds`` alone ends the run).
        max_seconds: Wall-clock budget, kept across resumed runs; the schedule then follows time.
            With ``steps`` too, the run ends at whichever comes first.
        learning_rate: Peak, reached after ``warmup_steps``; then a cosine falls to
            ``min_learning_rate`` at the end of the run.
        weight_decay: Of matrices; vectors (norms, biases, decays) have none.
        grad_clip: Largest global gradient norm (0: no clipping).
    """

    batch_size: int
    sequence_length: int
    steps: int | None = None
    max_seconds: float | None = None
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-5
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        if self.steps is None and self.max_seconds is None:
            raise EdgelinError("optim has neither 'steps' nor 'max_seconds'; give the run an end")
        for name in ("batch_size", "sequence_length", "steps", "max_seconds", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise EdgelinError(f"optim.{name} is {value}; it must be above 0")
        if self.steps is not None:
            check_range("optim.steps", self.steps, 1, _MOST_STEPS)
        for name in ("warmup_steps", "weight_decay", "grad_clip", "min_learning_rate"):
            check_range(f"optim.{name}", getattr(self, name), 0)
        if self.min_learning_rate > self.learning_rate:
            raise EdgelinError(
                f"optim.min_learning_rate is {self.min_learning_rate}, more than "
                f"optim.learning_rate = {self.learning_rate}; lower it"
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise EdgelinError(
                    f"optim.{name} is {getattr(self, name)}; give 0 or more, and below 1"
                )


@dataclass(frozen=True)
class RunConfig:
    """Everything of one training run: the content of a TOML file.

    Args:
        seed: Fixes initial weights, data order and dropout.
        log_every: Steps between lines of the log.
        eval_every: Steps between held-out measurements (0: only at the end).
        eval_tokens: Held-out tokens of such a measurement; the last one reads the whole text, and
            features are read whole each time.
        save_every: Steps between checkpoints (0: only at the end).
        compile: Whether to pass the model through ``torch.compile`` (GPU and text only).
    """

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    seed: int = 0
    log_every: int = 10
    eval_every: int = 500
    eval_tokens: int = 131072
    save_every: int = 1000
    compile: bool = False

    def __post_init__(self) -> None:
        check_range("seed", self.seed, 0, _MOST_SEED)
        for name, least in (
            ("log_every", 1),
            ("eval_every", 0),
            ("eval_tokens", 1),
            ("save_every", 0),
        ):
            check_range(name, getattr(self, name), least)
        if self.model.features is not None:
            self._refuse_text_settings()

    def _refuse_text_settings(self) -> None:
        """What is for text only is left out with features."""
        data = self.data
        for name, value in (
            ("data.tokenizer", data.tokenizer),
            ("data.cache", data.cache),
            ("data.carry_state", data.carry_state),
            ("compile", self.compile),
        ):
            if value:
                raise EdgelinError(f"{name} is {value!r}, which is for text only; leave it out")


def load_run(
    path: str | Path, overrides: Sequence[str] = (), *, model: ModelConfig | None = None
) -> RunConfig:
    """Read a training run from a TOML file.

    Args:
        path: The file; paths inside it are relative to its folder.
        overrides: Settings such as ``"optim.steps=10"`` that replace the file's; values are TOML,
            or plain text. Paths in them are relative to the file too.
        model: Where keys of the table ``model`` come from that the file leaves out.

    Raises:
        EdgelinError: The file cannot be read, is no TOML, or has a key that is not known.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EdgelinError(f"cannot read the config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or a NUL in the path, too
        raise EdgelinError(f"{path} is not valid TOML: {error}") from error
    for setting in overrides:
        _override(values, setting)
    if model is not None and isinstance(values.get("model", {}), dict):
        values["model"] = to_dict(model) | values.get("model", {})
    config = from_dict(RunConfig, values)
    data = config.data

    def resolve(name: str | None) -> str | None:
        return None if name is None else str(path.parent / name)

    data = dataclasses.replace(
        data,
        train=tuple(str(path.parent / name) for name in data.train),
        valid=tuple(str(path.parent / name) for name in data.valid),
        tokenizer=resolve(data.tokenizer),
        cache=resolve(data.cache),
    )
    return dataclasses.replace(config, data=data)


def _override(values: dict[str, Any], setting: str) -> None:
    """Put one ``a.b=value`` into the nested tables."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise EdgelinError(f"--set {setting!r} is no setting; write it as optim.steps=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    *parents, last = key.strip().split(".")
    table = values
    for name in parents:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise EdgelinError(f"--set {setting!r}: {name!r} is no table in the config")
    table[last] = value


def from_dict(cls: type[C], values: Mapping[str, Any], where: str = "config") -> C:
    """Build the dataclass ``cls`` from plain values, nested dataclasses included.

    Raises:
        EdgelinError: A key is unknown or missing, or a value has the wrong type.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(fields)}"
            raise EdgelinError(f"{where} has an unknown key {key!r}; {hint}")
    for name, spec in fields.items():
        required = (
            spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        )
        if required and name not in values:
            raise EdgelinError(f"{where} lacks the key {name!r}")
    return cls(**{k: _convert(hints[k], v, f"{where}.{k}") for k, v in values.items()})


def to_dict(config: Any) -> dict[str, Any]:
    """The plain values of a config dataclass, ready for JSON."""
    return dataclasses.asdict(config)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_dict(typing.cast(type[Any], hint), value, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise EdgelinError(f"{where} is {value!r}; a list is needed")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise EdgelinError(f"{where} is {value!r}; a table is needed")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise EdgelinError(f"{where} is {value!r}; {hint.__name__} is needed")
    if hint is float and not math.isfinite(value):
        raise EdgelinError(f"{where} is {value}; a finite number is needed")
    return value


__all__ = [
    "DataConfig",
    "FeatureConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "check_range",
    "from_dict",
    "load_run",
    "to_dict",
]
