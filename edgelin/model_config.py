"""Sizes of a model: what its stream is, and for every layer the name of a mixer.

A model is a list of layers and a table of mixers (see :mod:`edgelin.config`). A layer adds two
branches to the stream: its mixer, and what follows it, a gated MLP unless ``mlps`` names something
else, which is then a table among the mixers too. So is a side branch, which helps the mixer alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgelin.errors import EdgelinError

_MOST_WORDS = 1 << 20
MOST_WIDTH = 1 << 20
_MOST_LAYERS = 1024
_TYPE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
HEADS = ("step", "sequence")
TASKS = ("classification", "regression")
NORMS = ("rms", "layer")
NORM_PLACES = ("before", "after", "both", "stream")


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
        check_range("model.features.size", self.size, 1, MOST_WIDTH)
        check_range("model.features.outputs", self.outputs, 1, MOST_WIDTH)
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
        plain = all(label and label.isprintable() for label in self.labels)
        if not plain or len(set(self.labels)) != len(self.labels):
            raise EdgelinError(
                f"model.features.labels is {list(self.labels)}; each class needs a name of its own "
                f"in printable characters"
            )
        if self.labels and self.task == "regression":
            raise EdgelinError(
                "model.features.labels names classes, but the task is regression; leave them out"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a sequence model and the mixer of every layer.

    Args:
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the gated MLP; 0: a layer is its mixer alone.
        layers: For every layer the name of its mixer in ``mixers``.
        mixers: Name to mixer table; each has ``type`` and the keys of that mixer's ``Config``.
        vocab_size: Rows of the token embedding; 0 with ``features``.
        features: What the stream is if not text.
        mlps: For every layer the name in ``mixers`` of what follows its mixer, or "" for nothing;
            empty: a gated MLP of ``intermediate_size`` everywhere.
        sides: For every layer the name in ``mixers`` of a side branch, or "" for none: its mixer
            reads the stream and what that gives, which is not added to the stream; empty: none.
        norm: ``rms``, or ``layer`` for LayerNorm with a bias.
        norm_places: For every layer where its branches are normalised: ``before``, ``after`` (what
            they add to the stream), ``both``, or ``stream``: before, and what they add to is
            normalised too; empty: before, everywhere.
        embedding_norm: Whether the embedding is normalised before the first layer.
        tie_word_embeddings: Whether the head shares the embedding matrix.
        rms_norm_eps: Added to the mean square (or the variance) in every norm.
        logit_softcap: c of logits = c tanh(logits / c); 0: none.
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
    mlps: tuple[str, ...] = ()
    sides: tuple[str, ...] = ()
    norm: str = "rms"
    norm_places: tuple[str, ...] = ()
    embedding_norm: bool = False
    logit_softcap: float = 0.0

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
        check_range("model.hidden_size", self.hidden_size, 1, MOST_WIDTH)
        check_range("model.intermediate_size", self.intermediate_size, 0, MOST_WIDTH)
        if not 0 < self.rms_norm_eps < 1:
            raise EdgelinError(
                f"model.rms_norm_eps is {self.rms_norm_eps}; it must be above 0 and below 1"
            )
        if not 0 <= self.dropout < 1:
            raise EdgelinError(f"model.dropout is {self.dropout}; give 0 or more, and below 1")
        if self.norm not in NORMS:
            raise EdgelinError(f"model.norm is {self.norm!r}; allowed: {', '.join(NORMS)}")
        for place in self.norm_places:
            if place not in NORM_PLACES:
                raise EdgelinError(
                    f"model.norm_places has {place!r}; allowed: {', '.join(NORM_PLACES)}"
                )
        if self.norm_places and len(self.norm_places) != len(self.layers):
            raise EdgelinError(
                f"model.norm_places has {len(self.norm_places)} words for {len(self.layers)} "
                f"layers; give one each, or leave it out"
            )
        check_range("model.logit_softcap", self.logit_softcap, 0)
        for name, table in self.mixers.items():
            _check_mixer(f"model.mixers.{name}", table)
        self._check_names("model.layers", self.layers)
        for where, names in (("model.mlps", self.mlps), ("model.sides", self.sides)):
            self._check_names(where, tuple(filter(None, names)))
            if names and len(names) != len(self.layers):
                raise EdgelinError(
                    f"{where} has {len(names)} names for {len(self.layers)} layers; give one "
                    f'each ("" for none), or leave it out'
                )
        if "stream" in self.norm_places and any(self.sides):
            raise EdgelinError(
                "model.norm_places has 'stream', and model.sides keeps what it names out of the "
                "stream; leave one of them out"
            )
        if self.mlps and self.intermediate_size:
            raise EdgelinError(
                f"model.mlps says what follows the mixers, so that model.intermediate_size = "
                f"{self.intermediate_size} would not be used; set it to 0"
            )

    def _check_names(self, where: str, names: tuple[str, ...]) -> None:
        """Every name is one of a mixer's table."""
        for name in names:
            if name not in self.mixers:
                raise EdgelinError(
                    f"{where} names {name!r}, which model.mixers does not define; "
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
