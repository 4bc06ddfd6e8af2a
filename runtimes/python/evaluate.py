"""Quality of a bundle on a text read as one stream, alone or against a second bundle.

bits per byte = sum over tokens of -log2 p(token | all before) / UTF-8 bytes of the text. The first
token is predicted from the end token, as in ``edgelin.train.evaluate``. Against a second bundle q:
mean over positions of KL(q || p) in nat, and the share of positions where both rank the same token
first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from edgelin import tokenizer as tokenizers
from edgelin.errors import EdgelinError
from edgelin.runtimes import checks
from edgelin.runtimes.distribution import log_softmax
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.text import TextCodec, check_unicode


@dataclass(frozen=True)
class Quality:
    """What :func:`evaluate` measures.

    Args:
        tokens: Tokens predicted.
        bytes: UTF-8 bytes of the text that these tokens stand for.
        bits_per_byte: See the module's docstring.
        against_bits_per_byte: The same of the second bundle.
        kl_nat: Mean KL(second || first) in nat.
        top1_agreement: Share of positions where both rank the same token first.
    """

    tokens: int
    bytes: int
    bits_per_byte: float
    against_bits_per_byte: float | None = None
    kl_nat: float | None = None
    top1_agreement: float | None = None


def evaluate(
    bundle: Bundle, text: str, *, against: Bundle | None = None, max_tokens: int | None = None
) -> Quality:
    """Measure a bundle on a text.

    Args:
        bundle: The bundle p.
        text: The text; with ``max_tokens`` only its first tokens are read.
        against: The bundle q to compare with; its tokenizer must be the same.
        max_tokens: Tokens to predict at most.

    Raises:
        EdgelinError: The text is empty, or the bundles have different tokenizers.
    """
    codec, tokenizer = bundle.text, bundle.manifest.tokenizer
    assert tokenizer is not None  # or the codec had refused
    ids, size = text_tokens(codec, text, tokenizer.eos_token_id, max_tokens)
    bundles = [bundle]
    if against is not None:
        if against.text.tokenizer.to_str() != bundle.text.tokenizer.to_str():
            raise EdgelinError(
                f"{bundle.path} and {against.path} have different tokenizers; "
                "only bundles of one tokenizer can be compared token by token"
            )
        bundles.append(against)
    streams = [b.stream(capsule="none") for b in bundles]
    chunk = min(b.manifest.chunk for b in bundles)
    nats, kl, agreed = [0.0] * len(bundles), 0.0, 0
    for start in tqdm(range(0, len(ids) - 1, chunk), unit="chunk", disable=None, leave=False):
        inputs, targets = ids[start : start + chunk], ids[start + 1 : start + chunk + 1]
        inputs = inputs[: len(targets)]
        logs = [log_softmax(stream.feed(inputs, all_logits=True)) for stream in streams]
        for index, rows in enumerate(logs):
            nats[index] -= float(rows[np.arange(len(targets)), targets].sum())
        if against is not None:
            p, q = logs
            kl += float((np.exp(q) * (q - p)).sum())
            agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    count = len(ids) - 1
    bits = [nat / math.log(2) / size for nat in nats]
    if against is None:
        return Quality(count, size, bits[0])
    return Quality(count, size, bits[0], bits[1], kl / count, agreed / count)


def evaluate_checkpoint(folder: Path, text: str, *, max_tokens: int | None = None) -> Quality:
    """Measure a checkpoint folder in torch, by ``edgelin.train.evaluate``.

    Raises:
        EdgelinError: torch is not installed, or the folder is no checkpoint.
    """
    with checks.needing_torch(folder):
        from edgelin import checkpoint
        from edgelin.train.evaluate import streamed_bits_per_byte
    model, config = checkpoint.load(folder)
    if config.features is not None:
        raise EdgelinError(f"{folder} reads features, not text; give it --features")
    tokenizer = tokenizers.load(folder / "tokenizer.json")
    codec = TextCodec(folder / "tokenizer.json", config.vocab_size)
    ids, size = text_tokens(codec, text, tokenizers.end_token_id(tokenizer), max_tokens)
    if max_tokens is not None:
        # A character that the limit cuts is dropped: the model reads text, not tokens.
        text = b"".join(map(codec.source_bytes, ids[1:].tolist())).decode("utf-8", "ignore")
        size = len(text.encode())
    bits = streamed_bits_per_byte(model, tokenizer, text)
    return Quality(len(ids) - 1, size, bits)


def text_tokens(
    codec: TextCodec, text: str, end: int, max_tokens: int | None
) -> tuple[NDArray[np.int64], int]:
    """The end token and the text's first tokens, and the bytes that the latter stand for.

    Raises:
        EdgelinError: The text is empty.
    """
    if max_tokens is not None:
        max_tokens = checks.positive("max_tokens", max_tokens)
    check_unicode(text)
    pieces: list[NDArray[np.int64]] = []
    found = 0
    for piece in tokenizers.encode(codec.tokenizer, [text]):
        pieces.append(piece)
        found += len(piece)
        if max_tokens is not None and found >= max_tokens:
            break
    if not found:
        raise EdgelinError("the text is empty; give at least one character")
    ids = np.concatenate(pieces)[:max_tokens]
    whole = max_tokens is None or len(ids) < max_tokens
    size = len(text.encode()) if whole else sum(map(len, map(codec.source_bytes, ids.tolist())))
    return np.concatenate([[end], ids]), size
