"""A sentencepiece model (``tokenizer.model``, BPE or Unigram) as a ``tokenizer.json``.

What sentencepiece does, written for the ``tokenizers`` library, which runs where sentencepiece is
not installed:

- the normaliser: its table of characters, spaces that are removed, ``▁`` before the text
- BPE: two neighbours are joined if what they make is a piece, the best score first; so every way to
  cut a piece into two pieces is a merge, in the order of the scores
- Unigram: the likeliest cut into pieces (Kudo 2018, arXiv:1804.10959, equation 7)
- characters without a piece: bytes, or one unknown token for a run of them

The result is compared with sentencepiece itself before it is used (:func:`_prove`). These may
differ: with a table of characters, combining marks out of their canonical order or behind a
character that the table replaces; with Unigram, cuts that are equally likely up to rounding. A text
between special tokens is encoded as a text of its own.

Source: github.com/google/sentencepiece, src/normalizer.cc, bpe_model.cc, unigram_model.cc.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from edgelin.errors import EdgelinError

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
_KINDS = {_UNIGRAM: "unigram", _BPE: "bpe", 3: "word", 4: "char"}
_PROOFS = 400
_HARD = (
    "", " ", "  ", " a", "a ", "  a  b\n\n c\t ", "\n", "▁", "a▁", "aaaaaaaaaaaaaaa", "ababababa",
    "0123456789 1000000 3.14", "Grüße aus Köln, naïve café!", "日本語 テキスト 한국어 текст",
    "e\u0301 o\u0323\u0302 \u1112\u1161\u11ab", "🙂🙃👩\u200d👩\u200d👧", "ﬁ ① ½ Å ＡＢＣ ｶﾞ",
    "\u00a0\u3000\u200b\u0085", "\u0378\u0379 \U000e0fff",
)  # fmt: skip


def convert(path: Path) -> Any:
    """Make the tokenizer of a sentencepiece model.

    Args:
        path: The file ``tokenizer.model``.

    Raises:
        EdgelinError: It is no sentencepiece model, has something that is not computed, or the
            result would differ from sentencepiece.
    """
    proto, processor = _read(path)
    _refuse_unsupported(path, proto)
    pieces = proto.pieces
    user = [p.piece for p in pieces if p.type == _USER]
    normalizer = _normalizer(proto)
    for symbol in user:
        if normalizer is not None and _spaced(normalizer, symbol) != symbol:
            raise EdgelinError(f"{path}: its normaliser changes its symbol {symbol!r}")
    if proto.trainer_spec.model_type == _BPE:
        model = _bpe(path, proto, ignore_merges=bool(user))
    else:
        model = _unigram(proto)
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    splits = _splits(proto, user)
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = _decoder(proto)
    tokenizer.add_special_tokens(
        [
            AddedToken(p.piece, special=True, normalized=False)
            for p in pieces
            if p.type in (_UNKNOWN, _CONTROL)
        ]
    )
    _prove(path, tokenizer, processor, proto)
    return tokenizer


def _read(path: Path) -> tuple[Any, Any]:
    """The parsed file, and sentencepiece's own reader of it."""
    from google.protobuf.message import DecodeError
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    raw, proto = path.read_bytes(), sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(raw)
        return proto, SentencePieceProcessor(model_proto=raw)
    except (DecodeError, RuntimeError) as error:
        raise EdgelinError(
            f"{path} is no sentencepiece model; convert its tokenizer to a tokenizer.json first"
        ) from error


def _refuse_unsupported(path: Path, proto: Any) -> None:
    """Refuse by name what is not computed here."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    kind = trainer.model_type
    unused = [p.piece for p in proto.pieces if p.type == _UNUSED]
    for problem, found in (
        (f"model_type {_KINDS.get(kind, kind)}", kind not in (_UNIGRAM, _BPE)),
        ("treat_whitespace_as_suffix", trainer.treat_whitespace_as_suffix),
        ("no escape_whitespaces", not normalizer.escape_whitespaces),
        ("a denormaliser", bool(proto.denormalizer_spec.precompiled_charsmap)),
        (f"unused pieces, such as {unused[:1]}", bool(unused)),
    ):
        if found:
            raise EdgelinError(
                f"{path} has {problem}, which is not supported; convert it to a tokenizer.json"
            )


def _normalizer(proto: Any) -> Any:
    """From a text to what is cut into pieces."""
    spec = proto.normalizer_spec
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        # Before, since the library loses marks of a letter that is not composed; behind, since it
        # reads ｶﾞ as two characters.
        composed = [normalizers.NFC()] if _composes(proto) else []
        steps += [*composed, normalizers.Precompiled(spec.precompiled_charsmap), *composed]
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _composes(proto: Any) -> bool:
    """Whether the table of characters makes one of a letter and its marks, as NFC does."""
    from sentencepiece import SentencePieceNormalizer

    own = SentencePieceNormalizer(model_proto=proto.SerializeToString())
    return str(own.normalize("e\u0301").strip(f" {_SPACE}")) == "é"


def _spaced(normalizer: Any, symbol: str) -> str:
    """A symbol of the vocabulary after the normaliser, without the space before the text."""
    text: str = normalizer.normalize_str(f"x{symbol.replace(_SPACE, ' ')}x")
    return text.removeprefix(_SPACE)[1:-1]


def _bpe(path: Path, proto: Any, *, ignore_merges: bool) -> Any:
    """Merges in the order in which sentencepiece makes them."""
    pieces = proto.pieces
    normal = {p.piece: (-p.score, i) for i, p in enumerate(pieces) if p.type == _NORMAL}
    for piece in normal:
        if lost := [c for c in piece if c not in normal]:
            raise EdgelinError(f"{path}: the piece {piece!r} has no piece of its {lost[0]!r}")
    merges = []
    for piece in sorted(normal, key=lambda piece: normal[piece]):
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [(left, right) for left, right in halves if left in normal and right in normal]
    return models.BPE(
        {p.piece: i for i, p in enumerate(pieces)},
        merges,
        unk_token=next(p.piece for p in pieces if p.type == _UNKNOWN),
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        ignore_merges=ignore_merges,
    )


def _unigram(proto: Any) -> Any:
    """Pieces and their scores; symbols of the user get the score that sentencepiece gives them."""
    pieces = proto.pieces
    scores = [
        (p.piece, 0.1 * (len(p.piece.encode()) - 1) if p.type == _USER else p.score) for p in pieces
    ]
    unknown = next(i for i, p in enumerate(pieces) if p.type == _UNKNOWN)
    return models.Unigram(scores, unknown, byte_fallback=proto.trainer_spec.byte_fallback)


def _splits(proto: Any, user: Sequence[str]) -> list[Any]:
    """Cuts before the model: round symbols of the user, and within the names of reserved tokens.

    The second keeps a text from spelling a control or byte token, which Unigram, and BPE where
    whole symbols are looked up, would take for a piece.
    """
    bpe = proto.trainer_spec.model_type == _BPE
    if bpe and not user:
        return []
    reserved = [p.piece for p in proto.pieces if p.type in (_UNKNOWN, _CONTROL, _BYTE)]
    inside = "|".join(f"(?<={re.escape(n[0])})(?={re.escape(n[1:])})" for n in reserved if n[1:])
    splits = [pre_tokenizers.Split(Regex(inside), "isolated")] if inside else []
    if bpe:
        longest_first = sorted(user, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first))
        splits.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    return splits


def _decoder(proto: Any) -> Any:
    """From tokens to text."""
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _prove(path: Path, tokenizer: Any, processor: Any, proto: Any) -> None:
    """Refuse a result that differs from sentencepiece on hard and on random texts."""
    for text in _texts(proto):
        ours = tokenizer.encode(text, add_special_tokens=False).ids
        theirs = processor.encode(text)
        if ours != theirs and not _equally_likely(proto, ours, theirs):
            raise EdgelinError(
                f"{path}: {text[:60]!r} would be cut otherwise than sentencepiece does; convert it "
                f"to a tokenizer.json by other means"
            )


def _equally_likely(proto: Any, *cuts: Sequence[int]) -> bool:
    """Whether two cuts of a Unigram model differ by no more than sentencepiece's rounding."""
    if proto.trainer_spec.model_type != _UNIGRAM:
        return False
    first, second = (sum(proto.pieces[i].score for i in ids) for ids in cuts)
    return bool(abs(first - second) <= 1e-6 * abs(first))


def _texts(proto: Any) -> Iterator[str]:
    """Hard texts, and random ones of pieces and characters; none spells a reserved token."""
    yield from _HARD
    draw = random.Random(0)
    pieces = [p.piece.replace(_SPACE, " ") for p in proto.pieces if p.type in (_NORMAL, _USER)]
    letters = [chr(c) for c in (*range(32, 0x300), *range(0x370, 0x590), *range(0x4E00, 0x4F00))]
    for i in range(_PROOFS):
        rare = 0.1 * (i % 4)
        parts = [draw.choice(letters if draw.random() < rare else pieces) for _ in range(24)]
        if i % 5 == 0:  # repetitions, where the order of merges shows
            parts = parts[:3] * 8
        yield "".join(parts)


__all__ = ["convert"]
