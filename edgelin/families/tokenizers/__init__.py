"""Tokenizers of foreign checkpoints, and what belongs to them: end tokens, chat template, defaults.

The files of a checkpoint of ours: ``tokenizer.json``, copied or converted
(:mod:`edgelin.families.tokenizers.sentencepiece`, :mod:`edgelin.families.tokenizers.rwkv`);
``generation_config.json`` with every id that ends a text; ``tokenizer_config.json``; and
``chat_template.jinja``, wherever the template came from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from edgelin import tokenizer as tokenizers
from edgelin.checkpoint import CHAT_TEMPLATE
from edgelin.errors import EdgelinError
from edgelin.families.reading import read_json
from edgelin.files import replacing

_CONFIG, _GENERATION = "tokenizer_config.json", "generation_config.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# Tokenizers that begin a text with the begin token unless add_bos_token says otherwise.
_BEGINNING = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


def convert(
    folder: Path, out: Path, config: Mapping[str, Any], vocab_size: int | None = None
) -> None:
    """Write the tokenizer of a foreign checkpoint into one of ours.

    Args:
        folder: The foreign checkpoint; without a tokenizer, none is written.
        out: Our checkpoint.
        config: Its ``config.json``, which may name end tokens too.
        vocab_size: Rows of the embedding, within which end tokens must lie; None: not known.

    Raises:
        EdgelinError: A file is damaged, or has something that is not understood.
    """
    settings = _settings(folder)
    template = _template(folder, settings)
    settings = {k: v for k, v in settings.items() if k not in ("chat_template", "auto_map")}
    tokenizer = _tokenizer(folder, out / "tokenizer.json", settings)
    if tokenizer is not None:
        ends = list(dict.fromkeys(_ends(folder, config, settings, tokenizer)))
        for end in ends:
            if vocab_size is not None and not 0 <= end < vocab_size:
                raise EdgelinError(
                    f"{folder}: eos_token_id {end} is beyond the {vocab_size} tokens of the model; "
                    f"correct it in generation_config.json or config.json"
                )
        generation = _optional(folder / _GENERATION) | ({"eos_token_id": ends} if ends else {})
        generation = {key: value for key, value in generation.items() if value is not None}
        if generation:
            _write(out / _GENERATION, _as_json(generation))
        if settings:
            _write(out / _CONFIG, _as_json(settings))
        if template:
            _write(out / CHAT_TEMPLATE, template)


def _tokenizer(folder: Path, target: Path, settings: Mapping[str, Any]) -> Any:
    """Copy or convert; None where there is none."""
    if (folder / "tokenizer.json").is_file():
        with replacing(target) as part:
            shutil.copyfile(folder / "tokenizer.json", part)
        return tokenizers.load(target)
    vocabularies = sorted(folder.glob("rwkv_vocab_v*.txt"))
    if (folder / "tokenizer.model").is_file():
        from edgelin.families.tokenizers import sentencepiece

        tokenizer = sentencepiece.convert(folder / "tokenizer.model")
    elif vocabularies:
        from edgelin.families.tokenizers import rwkv

        names = {number: token.content for number, token in _added(folder, settings)}
        tokenizer = rwkv.convert(vocabularies[0], names.get(0, rwkv.END))
    else:
        return None
    _add(folder, tokenizer, settings)
    _begin(tokenizer, settings)
    _write(target, tokenizer.to_str(pretty=False))
    return tokenizer


def _add(folder: Path, tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Add the tokens that the folder defines beside the vocabulary, at the ids that it gives."""
    for number, token in _added(folder, settings):
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        found = tokenizer.token_to_id(token.content)
        if found != number:
            raise EdgelinError(
                f"{folder}: the added token {token.content!r} would have id {found}, not {number}; "
                f"convert its tokenizer to a tokenizer.json"
            )


def _added(folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    """Ids and tokens besides the vocabulary, in order."""
    found: dict[int, AddedToken] = {}
    for name, number in _optional(folder / "added_tokens.json").items():
        found[int(number)] = AddedToken(name, special=True, normalized=False)
    for number, entry in settings.get("added_tokens_decoder", {}).items():
        flags = ("single_word", "lstrip", "rstrip", "special")
        given = {key: bool(entry[key]) for key in flags if key in entry}
        found[int(number)] = AddedToken(entry["content"], normalized=False, **given)
    yield from sorted(found.items(), key=lambda item: item[0])


def _begin(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Have a text begin with the begin token where the folder's tokenizer does so."""
    name = settings.get("bos_token")
    begins = settings.get("add_bos_token")
    if begins is None:
        begins = str(settings.get("tokenizer_class", "")).removesuffix("Fast") in _BEGINNING
    number = tokenizer.token_to_id(name) if name else None
    if begins and number is not None:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, number)]
        )


def _settings(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json``, its tokens as plain text, with those of the older map."""
    found = _optional(folder / "special_tokens_map.json") | _optional(folder / _CONFIG)
    for role in _ROLES:
        if isinstance(found.get(role), dict):
            found[role] = found[role].get("content")
    return {key: value for key, value in found.items() if value is not None}


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    """The chat template, wherever it stands; "" where there is none."""
    if (folder / CHAT_TEMPLATE).is_file():
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if found is None:
        found = _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several by name
        by_name = {entry["name"]: entry["template"] for entry in found}
        found = by_name.get("default") or next(iter(by_name.values()), "")
    if found is not None and not isinstance(found, str):
        raise EdgelinError(
            f"{folder}: chat_template is {type(found).__name__}, not a text; correct or remove it"
        )
    return found or ""


def _ends(
    folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any], tokenizer: Any
) -> Iterator[int]:
    """Ids that end a text: of the generation's settings, of the config, of the tokenizer."""
    nested = config.get("text_config")
    for values in (_optional(folder / _GENERATION), config, nested or {}):
        ids = values.get("eos_token_id")
        ids = [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
        if odd := [i for i in ids if not isinstance(i, int)]:
            raise EdgelinError(f"{folder}: eos_token_id {odd[0]!r} is no integer; correct it")
        yield from ids
    # An ordinary token, such as the blank line of some RWKV folders, ends no text by itself.
    special = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    if settings.get("eos_token") in special:
        yield special[settings["eos_token"]]


def _optional(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no file."""
    return read_json(path) if path.is_file() else {}


def _as_json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


__all__ = ["convert"]
