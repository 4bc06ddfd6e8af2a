"""The Kotlin tokenizer beside the tokenizers library, on texts of all kinds.

``make test-jvm`` builds it.
"""

from __future__ import annotations

import json
import random
import subprocess
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).parents[2]
CLASSES = ROOT / "build" / "jvm" / "classes"
DEMO = ROOT / "examples" / "demo" / "checkpoint" / "tokenizer.json"
SAMPLE = (
    "The quiet river's run past 1234567 mills; we'll see, don't we? Grüße aus Köln — naïve\n\n"
    "\tdef f(x):\r\n        return  x ** 2  # 日本語 🙂🙃 \u00a0\u2003 العربية हिन्दी ǅungla Ⅻ ½ ²\n"
)
# Qwen's and Llama 3's words; a regular expression of another dialect than the JVM's.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

pytestmark = pytest.mark.skipif(not CLASSES.exists(), reason="not built; see make test-jvm")


def _texts() -> list[str]:
    """The sample, and characters of many scripts and kinds of spaces in random order."""
    rng = random.Random(0)
    kinds = ["abcXYZ ", " \n\t\r\u00a0\u2003\u3000\u0085\u200b", "0123²½Ⅻ٣", "éüßñǅ", "日本語한국"]
    kinds += ["🙂🙃👩‍👧", "'s'LL'ſ.,;!?—"]
    # A JVM may know fewer characters than the tokenizers library; both know those of Unicode 3.2.
    old = [chr(i) for i in range(32, 0x30000) if unicodedata.ucd_3_2_0.category(chr(i))[0] != "C"]
    texts = [
        SAMPLE,
        "",
        " ",
        "<|end|>",
        "a<|end|> b<|end|><|end|>",
        "a" * 300,
        " " * 90,
        "e\u0301 é",
    ]
    for _ in range(400):
        texts.append("".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randrange(1, 40))))
        texts.append("".join(rng.choices(old, k=9)))
    return texts


def _split(tokenizer: tokenizers.Tokenizer) -> None:
    """Words as Qwen and Llama 3 cut them."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _trained(kind: str) -> tokenizers.Tokenizer:
    """A small tokenizer of a kind."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama"))
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        _split(tokenizer)
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|end|>", "<|begin|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE * 20], trainer)
    tokenizer.add_tokens(["<tool>"])
    if kind == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
        )
    return tokenizer


def test_ids_are_those_of_the_tokenizers_library(tmp_path: Path) -> None:
    texts, jobs, wanted = [*_texts(), "a <tool>b"], [], []
    for kind in ("gpt2", "qwen", "llama", "demo"):
        path = DEMO
        if kind != "demo":
            path = tmp_path / f"{kind}.json"
            _trained(kind).save(str(path))
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        jobs.append({"tokenizer": str(path), "texts": texts})
        wanted.append([tokenizer.encode(text).ids for text in texts])
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [ROOT / "runtimes/jvm/build.sh", "edgelin.EncodeKt", tmp_path / "jobs.json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for job, ids, found in zip(jobs, wanted, json.loads(done.stdout), strict=True):
        for text, one, (two, back) in zip(texts, ids, found, strict=True):
            assert two == one, (job["tokenizer"], text)
            plain = text.replace("<|end|>", "")
            if "gpt2" not in job["tokenizer"] and "qwen" not in job["tokenizer"]:
                assert back == plain
