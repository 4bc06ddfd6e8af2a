"""Types of the values in the JSON of ``edgelin.json``, before anything is made of them.

A manifest whose digest was recomputed after an edit can hold anything; what passes here can be
compared, sorted and joined to a path without another thought.
"""

from __future__ import annotations

import math
import re
from typing import Any

from edgelin.model_config import HEADS, TASKS
from edgelin.state import GROWING, StateSpec

_VERSION = r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}"


def check_types(content: dict[str, Any]) -> None:
    """Check the type of every value that a runtime reads.

    Raises:
        ValueError: A value has another type; the message names it and says what is allowed.
        KeyError: A key is missing.
    """
    for key in ("model_hash", "profile", "edgelin_version", "default_variant"):
        _text(content[key], key)
    _need(_is_version(content["min_onnxruntime"]), content["min_onnxruntime"],
          "min_onnxruntime", 'a version such as "1.25.1"')  # fmt: skip
    _text(content["num_logits_to_keep"], "num_logits_to_keep")
    if content.get("lengths") is not None:
        _text(content["lengths"], "lengths")
    for key, low in (("opset", 1), ("chunk", 1)):
        _whole(content[key], key, low)
    if content["max_time"] is not None:
        _whole(content["max_time"], "max_time", 1)
    _signature(_object(content["input"], "input"), _object(content["output"], "output"))
    _need(isinstance(content["states"], list), content["states"], "states", "a list")
    for index, entry in enumerate(content["states"]):
        _state(entry, f"states[{index}]")
    if content["tokenizer"] is not None:
        _tokenizer(_object(content["tokenizer"], "tokenizer"))
    for name, entry in _object(content["variants"], "variants").items():
        _variant(_object(entry, f"variants.{name}"), f"variants.{name}")
    _records(content["files"], "files")
    # Bundles of the first version have no capsules.
    capsules = _object(content.get("capsules", {}), "capsules")
    _records(capsules, "capsules")
    for name, entry in capsules.items():
        _text(entry["file"], f"capsules.{name}.file")
    if content.get("default_capsule") is not None:
        _text(content["default_capsule"], "default_capsule")


def _signature(source: dict[str, Any], output: dict[str, Any]) -> None:
    """Input and output, of tokens or of features."""
    _text(source["name"], "input.name")
    _text(output["name"], "output.name")
    kind = source["kind"]
    _need(kind in ("tokens", "features"), kind, "input.kind", "tokens, features")
    if kind == "tokens":
        _whole(source["vocab_size"], "input.vocab_size", 1)
        return
    _whole(source["feature_size"], "input.feature_size", 1)
    _whole(output["size"], "output.size", 1)
    for key, allowed in (("head", HEADS), ("task", TASKS)):
        good = isinstance(output[key], str) and output[key] in allowed
        _need(good, output[key], f"output.{key}", ", ".join(allowed))
    labels = output["labels"]
    good = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    _need(good and len(labels) in (0, output["size"]), labels, "output.labels",
          f"a list of no or {output['size']} strings")  # fmt: skip


def _state(entry: Any, where: str) -> None:
    """One state, whose names must be those of its kind and layer."""
    entry = _object(entry, where)
    for key in ("kind", "dtype"):
        _text(entry[key], f"{where}.{key}")
    _need(isinstance(entry["layout"], str), entry["layout"], f"{where}.layout", "a string")
    if entry["layer"] is not None:
        _whole(entry["layer"], f"{where}.layer", 0)
    shape = entry["shape"]
    sizes = shape[1:] if isinstance(shape, list) and shape[:1] == ["batch"] else [None]
    fixed = [size for size in sizes if size != GROWING]
    good = all(_is_whole(size, 1) for size in fixed) and len(sizes) - len(fixed) <= 1
    _need(good, shape, f"{where}.shape",
          f'["batch", then whole numbers above 0, or once "{GROWING}"]')  # fmt: skip
    initial = entry["initial"]
    number = isinstance(initial, int | float) and not isinstance(initial, bool)
    _need(number and math.isfinite(initial), initial, f"{where}.initial", "a finite number")
    spec = StateSpec.from_dict(entry)
    for key, name in (
        ("name", spec.name),
        ("input", spec.input_name),
        ("output", spec.output_name),
    ):
        _need(entry[key] == name, entry[key], f"{where}.{key}", repr(name))


def _tokenizer(entry: dict[str, Any]) -> None:
    """File and ids of the tokenizer."""
    _text(entry["file"], "tokenizer.file")
    _whole(entry["eos_token_id"], "tokenizer.eos_token_id", 0)
    special = _object(entry["special_tokens"], "tokenizer.special_tokens")
    for name, number in special.items():
        _whole(number, f"tokenizer.special_tokens.{name}", 0)
    ends = entry.get("eos_token_ids", [])
    good = isinstance(ends, list) and all(_is_whole(number, 0) for number in ends)
    _need(good, ends, "tokenizer.eos_token_ids", "a list of whole numbers, 0 or more")
    if entry.get("chat_template") is not None:
        _text(entry["chat_template"], "tokenizer.chat_template")
    for name, text in _object(entry.get("chat_tokens", {}), "tokenizer.chat_tokens").items():
        _need(isinstance(text, str), text, f"tokenizer.chat_tokens.{name}", "a string")


def _variant(entry: dict[str, Any], where: str) -> None:
    """One graph, its files and its recipe."""
    _text(entry["file"], f"{where}.file")
    _records(entry["files"], f"{where}.files")
    recipe = entry["quantisation"]
    if recipe is None:
        return
    recipe, where = _object(recipe, f"{where}.quantisation"), f"{where}.quantisation"
    _need(recipe["bits"] in (4, 8), recipe["bits"], f"{where}.bits", "4 or 8")
    _whole(recipe["block_size"], f"{where}.block_size", 1)


def _records(files: Any, where: str) -> None:
    """Hash and size of files."""
    for name, record in _object(files, where).items():
        record = _object(record, f"{where}.{name}")
        _text(record["sha256"], f"{where}.{name}.sha256")
        _whole(record["bytes"], f"{where}.{name}.bytes", 0)


def _object(value: Any, where: str) -> dict[str, Any]:
    """The value, which must be a JSON object."""
    _need(isinstance(value, dict), value, where, "an object")
    found: dict[str, Any] = value
    return found


def _text(value: Any, where: str) -> None:
    """Refuse all but a string that is not empty."""
    _need(isinstance(value, str) and value != "" and "\0" not in value, value, where, "a string")


def _whole(value: Any, where: str, low: int) -> None:
    """Refuse all but a whole number from ``low`` on."""
    _need(_is_whole(value, low), value, where, f"a whole number, {low} or more")


def _is_whole(value: Any, low: int) -> bool:
    """Whether a value is a whole number from ``low`` on that fits an int64; true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63


def _is_version(value: Any) -> bool:
    """Whether a value is a version number."""
    return isinstance(value, str) and re.fullmatch(_VERSION, value) is not None


def _need(good: bool, value: Any, where: str, allowed: str) -> None:
    """Raise unless ``good``."""
    if not good:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ValueError(f"{where} is {shown}; allowed: {allowed}")
