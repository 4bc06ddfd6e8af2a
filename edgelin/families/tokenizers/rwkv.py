"""The RWKV World vocabulary (``rwkv_vocab_v20230424.txt``) as a ``tokenizer.json``.

A line of the file is an id, a Python literal of text or bytes, and its length in bytes. A text is
cut greedily: at every byte the longest token that fits (github.com/BlinkDL/RWKV-LM,
``rwkv_tokenizer.py``: a trie).

The trie becomes a regular expression: at every node its branches, optional where a token ends. A
backtracking matcher takes the longest token in it, as the trie does, so that the pieces of a
``Split`` are the tokens. It reads GPT-2's printable characters for bytes (``ByteLevel``), since a
token may be a part of a character.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from edgelin.errors import EdgelinError
from edgelin.tokenizer import BYTE_SYMBOLS

END = "<|endoftext|>"  # id 0, which the file leaves out
_LINE = re.compile(r"(\d+) (.+) (\d+)")


def convert(path: Path, end: str = END) -> Any:
    """Make the tokenizer of a vocabulary file.

    Args:
        path: The file.
        end: Name of token 0, which ends a document.

    Raises:
        EdgelinError: The file is damaged, or lacks one of the 256 bytes.
    """
    vocabulary = {"".join(BYTE_SYMBOLS[b] for b in token): i for token, i in _read(path).items()}
    tokenizer = tokenizers.Tokenizer(models.WordLevel({end: 0, **vocabulary}, unk_token=end))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Split(Regex(_longest_of(vocabulary)), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    return tokenizer


def _read(path: Path) -> dict[bytes, int]:
    """Token to id."""
    found: dict[bytes, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            matched = _LINE.fullmatch(line)
            token = ast.literal_eval(matched[2]) if matched else None
            token = token.encode() if isinstance(token, str) else token
            if matched is None or not isinstance(token, bytes) or len(token) != int(matched[3]):
                raise ValueError("it is no id, literal and length")
            if int(matched[1]) == 0 or token in found:
                raise ValueError("the id is 0, or the token stands twice")
        except (ValueError, SyntaxError) as error:
            raise EdgelinError(f"{path}, line {number}: {error}; copy the file again") from error
        found[token] = int(matched[1])
    if missing := [byte for byte in range(256) if bytes([byte]) not in found]:
        raise EdgelinError(f"{path} has no token of byte {missing[0]}; copy the file again")
    return found


def _longest_of(words: Iterable[str]) -> str:
    """A regular expression that matches the longest of some words that stands at a place."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(root)


def _branches(node: dict[str, Any]) -> str:
    """What may follow in a trie, optional where a word ends."""
    last = [c for c, below in node.items() if c and list(below) == [""]]
    choices = [re.escape(c) + _branches(below) for c, below in node.items() if c and c not in last]
    if last:  # one test for all of them
        choices.append(f"[{''.join(map(re.escape, last))}]")
    if not choices:
        return ""
    return f"(?:{'|'.join(choices)}){'?' if '' in node else ''}"


__all__ = ["END", "convert"]
