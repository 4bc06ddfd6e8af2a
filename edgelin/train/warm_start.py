"""Starting a run from a checkpoint's weights and tokenizer in the place of random ones."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from edgelin import checkpoint as checkpoints
from edgelin import mixers
from edgelin import tokenizer as tokenizers
from edgelin.config import ModelConfig, RunConfig
from edgelin.errors import EdgelinError
from edgelin.files import replacing

# What a checkpoint has besides its weights and sizes.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    checkpoints.CHAT_TEMPLATE,
)


def check(config: RunConfig, init: Path) -> None:
    """Refuse a run of another model, or with another tokenizer.

    Args:
        config: The run.
        init: A checkpoint of ours.

    Raises:
        EdgelinError: With what differs, or ``init`` is no checkpoint of ours.
    """
    found = checkpoints.read_config(init)
    wanted, has = _described(config.model), _described(found)
    if other := sorted(key for key in wanted if wanted[key] != has[key]):
        raise EdgelinError(
            f"model.{other[0]} is not that of --init {init}; a run goes on with the same model: "
            f"leave the table 'model' out"
        )
    own = config.data.tokenizer
    if own is not None and (init / "tokenizer.json").is_file():
        given, kept = (tokenizers.load(path).to_str() for path in (own, init / "tokenizer.json"))
        if given != kept:
            raise EdgelinError(
                f"data.tokenizer is {own}, not the tokenizer of --init {init}; leave it out"
            )


def copy_files(init: Path, out: Path) -> None:
    """Give a run the tokenizer of a checkpoint, and what belongs to it."""
    for name in _FILES:
        if (init / name).is_file():
            with replacing(out / name) as part:
                shutil.copyfile(init / name, part)


def _described(config: ModelConfig) -> dict[str, Any]:
    """The keys of ``model``, with mixers by what they are; dropout may be another."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    values |= {"dropout": None, "mixers": None}
    for key in ("layers", "mlps", "sides"):
        values[key] = [name and _mixer(config, name) for name in values[key]]
    return values


def _mixer(config: ModelConfig, name: str) -> tuple[str, Any]:
    """Type and settings of a mixer, defaults filled in."""
    table = config.mixers[name]
    return table["type"], mixers.read_config(table, where=f"model.mixers.{name}")[1]
