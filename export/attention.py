"""What layers that attend to all tokens become in a bundle: ``edgelin export --attention``.

``full`` leaves them, with states that grow. ``window=N,sinks=M`` gives them a ring of fixed size: a
token sees the last N tokens and the first M. That is another model with the same weights, so it is
exported from another ``config.json``, which the bundle carries: whoever compares a bundle with its
checkpoint finds there what was chosen.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgelin.errors import EdgelinError
from edgelin.families.convert import read_json
from edgelin.recurrences import CHUNK
from edgelin.runtimes.evaluate import evaluate_checkpoint

MEASURED_TOKENS = 4096  # of a text, or four windows if that is more
_CHOICE = re.compile(r"window=([0-9]{1,9})(?:,sinks=([0-9]{1,9}))?")
_CONFIG = "config.json"


@dataclass(frozen=True)
class Attention:
    """A choice.

    Args:
        window: Last tokens N that a token sees, itself included; 0: all.
        sinks: First tokens M that it sees besides.
    """

    window: int = 0
    sinks: int = 0

    def __str__(self) -> str:
        if not self.window:
            return "full"
        return f"window={self.window}" + (f",sinks={self.sinks}" if self.sinks else "")


@dataclass(frozen=True)
class Cost:
    """Bits per byte of a text with both kinds of attention.

    Args:
        tokens: Tokens of the text that were read.
        full: Attention to all of them.
        window: The choice.
    """

    tokens: int
    full: float
    window: float


def parse(text: str) -> Attention:
    """Read the value of ``--attention``.

    Raises:
        EdgelinError: It is none, or the window is shorter than a call.
    """
    if text == "full":
        return Attention()
    match = _CHOICE.fullmatch(text)
    if match is None:
        raise EdgelinError(
            f"--attention is {text!r}; give full, window=N or window=N,sinks=M, such as "
            f"window=1024,sinks=4"
        )
    window, sinks = int(match[1]), int(match[2] or 0)
    if window < CHUNK:
        raise EdgelinError(
            f"--attention {text}: a window has {CHUNK} tokens or more, as many as a call carries"
        )
    return Attention(window, sinks)


@contextlib.contextmanager
def applied(checkpoint: Path, choice: Attention) -> Iterator[Path]:
    """The checkpoint (of ours), or a temporary folder with its weights and another config.json.

    Raises:
        EdgelinError: A window is asked for, and no layer attends to all tokens.
    """
    if not choice.window:
        yield checkpoint
        return
    values = read_json(checkpoint / _CONFIG)
    tables = [table for table in _tables(values) if not table.get("window")]
    if not tables:
        raise EdgelinError(
            f"--attention {choice}: no layer of {checkpoint} attends to all tokens; "
            f"leave --attention out"
        )
    for table in tables:
        table["window"] = choice.window
        if choice.sinks:
            table["sinks"] = choice.sinks
    with tempfile.TemporaryDirectory(prefix="edgelin-") as temporary:
        folder = Path(temporary)
        for path in checkpoint.iterdir():
            if path.name != _CONFIG:
                (folder / path.name).symlink_to(path.resolve())
        (folder / _CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        yield folder


def chosen(checkpoint: Path, bundle: Path) -> Attention:
    """What was chosen when a bundle was exported from a checkpoint of ours."""
    if not all((folder / _CONFIG).is_file() for folder in (checkpoint, bundle)):
        return Attention()  # what is missing, reading it will say
    pairs = zip(*(_tables(read_json(f / _CONFIG)) for f in (checkpoint, bundle)), strict=False)
    for own, other in pairs:
        if not own.get("window") and other.get("window"):
            return Attention(other["window"], other.get("sinks", 0))
    return Attention()


def cost(full: Path, windowed: Path, choice: Attention, text: str) -> Cost:
    """Measure a checkpoint, and the one that :func:`applied` made of it, on a text.

    Raises:
        EdgelinError: The text is empty, or the model reads features.
    """
    limit = max(MEASURED_TOKENS, 4 * choice.window)
    found = [evaluate_checkpoint(folder, text, max_tokens=limit) for folder in (full, windowed)]
    return Cost(found[0].tokens, found[0].bits_per_byte, found[1].bits_per_byte)


def _tables(values: Any) -> Iterator[dict[str, Any]]:
    """The tables of attention mixers in a config, those that are parts of others too."""
    if isinstance(values, list):
        for item in values:
            yield from _tables(item)
    elif isinstance(values, dict):
        if values.get("type") == "attention":
            yield values
        for item in values.values():
            yield from _tables(item)
