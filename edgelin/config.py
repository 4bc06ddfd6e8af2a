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
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgelin.errors import EdgelinError

C = TypeVar("C")

_MOST_WORDS = 1 << 20
_MOST_WIDTH = 1 << 20
HEADS = ("step", "sequence")
TASKS = ("classification", "regression")
_MOST_LAYERS = 1024
_MOST_STEPS = 99_999_999  # snapshots are named by eight digits
_MOST_SEED = (1 << 31) - 1  # the seed of a step is seed * 2^32 + step, below 2^63
_TYPE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def check_range(name: str, value: float, least: float, most: float | None = None) -> None:
    """Refuse a number outside least..most, both allowed, and nan.

    Raises:
        EdgelinError: With the name, the value and what is allowed.
    """
    if not least <= value:
        raise EdgelinError(f"{name} is {value}; the least is {least}")
    if most is not None and not value <= most:
        raise EdgelinError(f"{name} is {value}; the most is {most}")


@dataclass(frozen=True)
class FeatureConfig:
    """A stream of measurements in the place of tokens, and what is told of it.

    Args:
        size: Numbers F of a step.
        outputs: Numbers that the head gives: scores of the classes, or the values of a regression.
        head: ``step``, an answer for every step; ``sequence``, an answer for all that was read so
            far, from the mean of the stream.
        task: ``classification`` or ``regression``.
        labels: Names of the classes; empty: they are numbered.
    """

    size: int
    outputs: int
    head: str = "step"
    task: str = "classification"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range("model.features.size", self.size, 1, _MOST_WIDTH)
        check_range("model.features.outputs", self.outputs, 1, _MOST_WIDTH)
        for name, allowed in (("head", HEADS), ("task", TASKS)):
            if getattr(self, name) not in allowed:
                raise EdgelinError(
                    f"model.features.{name} is {getattr(self, name)!r}; "
                    f"allowed: {', '.join(allowed)}"
                )
        if self.labels and len(self.labels) != self.outputs:
            raise EdgelinError(
                f"model.features.labels has {len(self.labels)} names for {self.outputs} outputs; "
                f"give a name each, or none"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a sequence model and the mixer of every layer.

    Args:
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the gated MLP.
        layers: For every layer the name of its mixer in ``mixers``.
        mixers: Name to mixer table; each has ``type`` and the keys of that mixer's ``Config``.
        vocab_size: Rows of the token embedding; 0 with ``features``.
        features: What the stream is if not text.
        tie_word_embeddings: Whether the head shares the embedding matrix.
        rms_norm_eps: Added to the mean square in every RMSNorm.
        dropout: Probability of dropping a residual branch's element while training.
    """

    hidden_size: int
    intermediate_size: int
    layers: tuple[str, ...]
    mixers: dict[str, dict[str, Any]]
    vocab_size: int = 0
    features: FeatureConfig | None = None
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise EdgelinError("model.layers is empty; name at least one mixer of model.mixers")
        check_range("the number of model.layers", len(self.layers), 1, _MOST_LAYERS)
        if self.features is None:
            check_range("model.vocab_size", self.vocab_size, 1, _MOST_WORDS)
        elif self.vocab_size:
            raise EdgelinError(
                "model has both vocab_size and features; a stream is tokens or measurements: "
                "leave one out"
            )
        check_range("model.hidden_size", self.hidden_size, 1, _MOST_WIDTH)
        check_range("model.intermediate_size", self.intermediate_size, 1, _MOST_WIDTH)
        if not 0 < self.rms_norm_eps < 1:
            raise EdgelinError(
                f"model.rms_norm_eps is {self.rms_norm_eps}; it must be above 0 and below 1"
            )
        if not 0 <= self.dropout < 1:
            raise EdgelinError(f"model.dropout is {self.dropout}; give 0 or more, and below 1")
        for name, table in self.mixers.items():
            _check_mixer(f"model.mixers.{name}", table)
        for name in self.layers:
            if name not in self.mixers:
                raise EdgelinError(
                    f"model.layers names {name!r}, which model.mixers does not define; "
                    f"it has: {', '.join(sorted(self.mixers)) or 'nothing'}"
                )


def _check_mixer(where: str, table: Any) -> None:
    """A mixer's table has a ``type`` that can name a module."""
    if not isinstance(table, Mapping):
        raise EdgelinError(f"{where} is {table!r}; a table with the key 'type' is needed")
    if "type" not in table:
        raise EdgelinError(f"{where} lacks the key 'type', the name of a mixer")
    name = table["type"]
    if not isinstance(name, str) or not _TYPE.fullmatch(name):
        raise EdgelinError(
            f"{where}.type is {name!r}; give the name of a mixer, "
            f"or the dotted path of a module with Config and Mixer"
        )


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
        noise: Standard deviation of the normal noise that training adds to normalised features.
    """

    train: tuple[str, ...]
    valid: tuple[str, ...] = ()
    tokenizer: str | None = None
    cache: str | None = None
    carry_state: bool = False
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not self.train:
            raise EdgelinError("data.train is empty; name at least one file")
        check_range("data.noise", self.noise, 0)
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
        self._check_kind()

    def _check_kind(self) -> None:
        """What is for text only is left out with features, and the other way round."""
        data = self.data
        others: dict[str, Any]
        if self.model.features is None:
            others = {"data.noise": data.noise}
        else:
            others = {
                "data.tokenizer": data.tokenizer,
                "data.cache": data.cache,
                "data.carry_state": data.carry_state,
                "compile": self.compile,
            }
        for name, value in others.items():
            if value:
                kind = "features" if self.model.features is None else "text"
                raise EdgelinError(f"{name} is {value!r}, which is for {kind} only; leave it out")


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a training run from a TOML file.

    Args:
        path: The file; paths inside it are relative to its folder.
        overrides: Settings such as ``"optim.steps=10"`` that replace the file's; values are TOML,
            or plain text. Paths in them are relative to the file too.

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
