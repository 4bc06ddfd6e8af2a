"""Converted tokenizers beside sentencepiece itself and the RWKV authors' own trie."""

from __future__ import annotations

import importlib.util
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers as library
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2

from edgelin.errors import EdgelinError
from edgelin.families import tokenizers
from edgelin.families.tokenizers import rwkv, sentencepiece
from edgelin.runtimes.text import TextCodec

ROOT = Path(__file__).parents[2]
MIXED = (
    "Grüße aus Köln, naïve café! 日本語 テキスト 한국어 ﬁ ① ½ Å ｶﾞ 🙂 aaa abab 3.14 <turn> \t x\n"
)
LLAMA = {
    "byte_fallback": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "split_digits": True,
}  # fmt: skip
GEMMA = LLAMA | {
    "add_dummy_prefix": False, "control_symbols": ["<ctl>"],
    "user_defined_symbols": ["▁▁", "▁▁▁▁", "\n", "\n\n", "<x>", "<x>y"],
}  # fmt: skip
T5 = {"normalization_rule_name": "nmt_nfkc"}
SYMBOLS = {
    "normalization_rule_name": "nfkc", "remove_extra_whitespaces": False,
    "user_defined_symbols": ["▁▁", "<x>"],
}  # fmt: skip
SETTINGS = {"llama": LLAMA, "gemma": GEMMA, "t5": T5, "symbols": SYMBOLS}


def train(folder: Path, **settings: Any) -> Path:
    """A small sentencepiece model."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines() + [MIXED] * 20
    out = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, vocab_size=700, minloglevel=2, **settings
    )
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    return folder / "tokenizer.model"


def texts(seed: int, symbols: list[str]) -> list[str]:
    """Texts of words, symbols, blanks and any characters; marks follow plain letters only."""
    draw = random.Random(seed)
    words = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split(" ") + MIXED.split(" ")
    blanks = [" ", "  ", "    ", "\n", "\n\n\n", "\t", "▁", " \n "]
    characters = [chr(c) for c in range(32, 0x11FFF) if not 0xD800 <= c < 0xE000]
    plain = [c for c in characters if not library.normalizers.NFD().normalize_str(c)[1:]]
    plain = [c for c in plain if not ("\u0300" <= c < "\u0370")]
    found = []
    for _ in range(300):
        kinds = (words, blanks, symbols or words, plain)
        parts = [draw.choice(draw.choice(kinds[: draw.choice((2, 3, 4))])) for _ in range(30)]
        found.append("".join(parts))
    return found


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("name", SETTINGS)
def test_sentencepiece_gives_the_same_ids_and_text(tmp_path: Path, kind: str, name: str) -> None:
    settings = SETTINGS[name]
    path = train(tmp_path, model_type=kind, **settings)
    oracle = SentencePieceProcessor(model_file=str(path))
    ours = sentencepiece.convert(path)
    ours = library.Tokenizer.from_str(ours.to_str())  # as it is read from its file
    symbols = [s.replace("▁", " ") for s in settings.get("user_defined_symbols", [])]
    ties = 0
    for text in texts(1, symbols) if name in ("llama", "gemma") else ascii_texts(symbols):
        ids = ours.encode(text, add_special_tokens=False).ids
        if ids != oracle.encode(text):  # the same pieces in another order are as likely
            assert kind == "unigram" and sorted(ids) == sorted(oracle.encode(text)), text
            ties += 1
        shown = ours.decode(ids, skip_special_tokens=False)
        assert shown == oracle.decode(ids).replace(" ⁇ ", "<unk>"), text
        if settings is LLAMA or settings is GEMMA:
            assert shown == text.replace("▁", " ")
    assert ties < 30  # of 300; how many depends on the pieces that training finds


def ascii_texts(symbols: list[str]) -> list[str]:
    """Texts without characters that a table of characters replaces, but for those of MIXED."""
    known = set(MIXED) | {chr(c) for c in range(32, 127)} | set(" \n")
    return ["".join(c for c in text if c in known) for text in texts(2, symbols)]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_text_cannot_spell_a_reserved_token(tmp_path: Path, kind: str) -> None:
    ours = sentencepiece.convert(train(tmp_path, model_type=kind, **GEMMA))
    ours.encode_special_tokens = True
    reserved = {ours.token_to_id(name) for name in ("<s>", "</s>", "<unk>", "<ctl>", "<0x41>")}
    for text in ("<s>", "a<ctl>b", "</s>", "<unk>", "<0x41>", "<x><s><x>"):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert not reserved & set(ids), text
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_the_proof_finds_a_wrong_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = train(tmp_path, model_type="bpe", **LLAMA)
    right = library.models.BPE

    def wrong(vocabulary: Any, merges: list[Any], **settings: Any) -> Any:
        return right(vocabulary, [*merges[1:], merges[0]], **settings)

    monkeypatch.setattr(sentencepiece.models, "BPE", wrong)
    with pytest.raises(EdgelinError, match="would be cut otherwise than sentencepiece does"):
        sentencepiece.convert(path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "word"}, "model_type word"),
        ({"model_type": "char"}, "model_type char"),
        ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    path = train(tmp_path, hard_vocab_limit=False, **settings)
    with pytest.raises(EdgelinError, match=words):
        sentencepiece.convert(path)


def test_unused_pieces_and_other_files_are_refused(tmp_path: Path) -> None:
    path = train(tmp_path, model_type="bpe", **LLAMA)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    proto.pieces[500].type = proto.SentencePiece.UNUSED
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(EdgelinError, match="unused pieces"):
        sentencepiece.convert(path)
    path.write_bytes(b"IQ== 0\nIg== 1\n")  # as of Llama 3
    with pytest.raises(EdgelinError, match="no sentencepiece model"):
        sentencepiece.convert(path)


@pytest.fixture(scope="module")
def world() -> tuple[Any, Any]:
    """The converted World vocabulary and the authors' own tokenizer."""
    spec = importlib.util.find_spec("rwkv")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).with_name("rwkv_vocab_v20230424.txt")
    trie = importlib.import_module("rwkv.rwkv_tokenizer").TRIE_TOKENIZER(str(path))
    ours = library.Tokenizer.from_str(rwkv.convert(path).to_str())
    return ours, trie


def test_the_world_vocabulary_on_texts(world: tuple[Any, Any]) -> None:
    ours, trie = world
    assert ours.get_vocab_size() == 65530
    for text in [*texts(3, ["\n\nUser: ", "    "]), "a" * 5000, " " * 5000, "一" * 2000]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == trie.encode(text)
        assert ours.decode(ids) == text


def test_the_world_vocabulary_on_any_bytes(world: tuple[Any, Any]) -> None:
    """What may stand before the model is a byte, also where it is no UTF-8."""
    ours, trie = world
    bare = json.loads(ours.to_str())
    bare["pre_tokenizer"] = bare["pre_tokenizer"]["pretokenizers"][1]
    bare = library.Tokenizer.from_str(json.dumps(bare))
    draw = random.Random(4)
    tokens = list(trie.token2idx)
    for _ in range(300):
        raw = draw.randbytes(60) + b"".join(draw.choice(tokens) for _ in range(40))
        raw = raw[draw.randrange(60) : len(raw) - draw.randrange(9)]
        symbols = "".join(rwkv.BYTE_SYMBOLS[byte] for byte in raw)
        assert bare.encode(symbols, add_special_tokens=False).ids == trie.encodeBytes(raw)


def test_the_world_vocabulary_in_a_bundle(world: tuple[Any, Any], tmp_path: Path) -> None:
    ours, trie = world
    ours.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path / "tokenizer.json", 65536)
    ids = codec.encode(MIXED + "\n\nUser: hi")
    assert b"".join(codec.token_bytes(i) for i in ids) == trie.decodeBytes(ids)
    assert codec.token_bytes(0) == b""


@pytest.mark.parametrize(
    ("line", "words"),
    [("1 '\\x00'", "no id, literal"), ("300 'ab' 3", "no id"), ("0 'ab' 2", "id is 0"),
     ("9 __import__('os') 2", "malformed node"), ("256 '\\x00' 1", "no token of byte 255")],
)  # fmt: skip
def test_a_damaged_world_vocabulary(tmp_path: Path, line: str, words: str) -> None:
    lines = [f"{i + 1} {bytes([i])!r} 1" for i in range(255)]
    path = tmp_path / "rwkv_vocab_v20230424.txt"
    path.write_text("\n".join([*lines, line][1 if "x00" in line else 0 :]) + "\n")
    with pytest.raises(EdgelinError, match=words):
        rwkv.convert(path)


def _write(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def _converted(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The files that the conversion writes, JSON parsed."""
    out = folder / "out"
    out.mkdir()
    tokenizers.convert(folder, out, config)
    return {
        path.name: json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()
        for path in out.iterdir()
    }


def test_every_end_token_is_kept_once(tmp_path: Path) -> None:
    train(tmp_path, model_type="bpe", **LLAMA)
    _write(
        tmp_path,
        generation_config={"eos_token_id": [7, 2], "pad_token_id": None, "temperature": 0.5},
        tokenizer_config={"eos_token": {"content": "<end>", "special": True}, "bos_token": "<s>"},
        added_tokens={"<end>": 700},
    )
    found = _converted(tmp_path, {"eos_token_id": 2, "text_config": {"eos_token_id": 9}})
    assert found["generation_config.json"] == {"eos_token_id": [7, 2, 9, 700], "temperature": 0.5}
    assert found["tokenizer_config.json"] == {"eos_token": "<end>", "bos_token": "<s>"}


def test_begin_and_added_tokens(tmp_path: Path) -> None:
    train(tmp_path, model_type="bpe", **LLAMA)
    added = {"content": "<|im_start|>", "special": True, "lstrip": False}
    plain = {"content": "<think>", "special": False}
    _write(
        tmp_path,
        tokenizer_config={
            "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>",
            "added_tokens_decoder": {"701": plain, "700": added},
        },
    )  # fmt: skip
    _converted(tmp_path, {})
    codec = TextCodec(tmp_path / "out" / "tokenizer.json", 800)
    assert codec.encode("<|im_start|>a")[:2] == [1, 700]
    assert codec.encode("<think>", start=False) == [701]
    assert codec.token_bytes(701) == b"<think>" and codec.token_bytes(700) == b""
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"900": added}})
    )
    with pytest.raises(EdgelinError, match=r"'<\|im_start\|>' would have id 700, not 900"):
        tokenizers.convert(tmp_path, tmp_path / "out", {})


@pytest.mark.parametrize("where", ["file", "config", "named", "processor"])
def test_the_chat_template_becomes_one_file(tmp_path: Path, where: str) -> None:
    train(tmp_path, model_type="bpe", **LLAMA)
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
        _write(tmp_path, tokenizer_config={"chat_template": "older"})
    elif where == "config":
        _write(tmp_path, tokenizer_config={"chat_template": template, "auto_map": {"x": "y.py"}})
    elif where == "named":
        named = [{"name": "rag", "template": "no"}, {"name": "default", "template": template}]
        _write(tmp_path, tokenizer_config={"chat_template": named})
    else:
        _write(tmp_path, chat_template={"chat_template": template})
    found = _converted(tmp_path, {})
    assert found["chat_template.jinja"] == template
    assert "tokenizer_config.json" not in found


def test_a_tokenizer_json_is_copied_and_none_is_no_error(tmp_path: Path) -> None:
    assert _converted(_write(tmp_path / "none"), {"eos_token_id": 1}) == {}
    tokenizer = library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a"))
    _write(tmp_path / "some")
    tokenizer.save(str(tmp_path / "some" / "tokenizer.json"))
    found = _converted(tmp_path / "some", {"eos_token_id": 0})
    assert found["generation_config.json"] == {"eos_token_id": [0]}
    read = (tmp_path / "some" / "out" / "tokenizer.json").read_bytes()
    assert read == (tmp_path / "some" / "tokenizer.json").read_bytes()
