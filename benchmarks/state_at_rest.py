"""What states in fewer bytes cost: quality where they are stored and read again every n tokens.

A stream reads a text in pieces of n tokens; after each, its states are encoded as a state file or a
pool would keep them, and decoded. Beside it a stream reads the same pieces and keeps its float32
states: bits per byte of both, the mean of KL(exact || stored) in nat a token, how often both rank
the same token first, and the size of the state file. Prints a Markdown table, and what rounding
alone does: the same of float32 states, between tokens read in pieces of 64 and one by one.

    python benchmarks/state_at_rest.py BUNDLE held-out.txt --tokens 20000
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import math
import platform
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import edgelin
from edgelin.runtimes import state_codec
from edgelin.runtimes.distribution import log_softmax
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.stream import Stream
from edgelin.runtimes.text_file import read_text

EVERY = (1, 64, 1024)
CHARACTERS = 8  # no text has more a token on average
HEAD = "| state | stored every | bits per byte | float32 | KL, nat | same first | file, bytes |"


@dataclasses.dataclass
class Row:
    """A line of the table."""

    dtype: str
    every: int
    bits: float
    exact_bits: float
    kl: float
    agreed: float
    bytes: int

    def __str__(self) -> str:
        return (
            f"| {self.dtype} | {self.every} tokens | {self.bits:.4f} | {self.exact_bits:.4f} "
            f"| {self.kl:.1e} | {self.agreed:.2%} | {self.bytes:,} |"
        )


def store(bundle: Bundle, stream: Stream, dtype: str) -> None:
    """Encode the states of a stream and decode them again."""
    saved = stream.saved()
    for spec in bundle.manifest.states:
        stored = state_codec.encode(saved.tensors[spec.name], dtype)
        saved.tensors[spec.name] = state_codec.decode(stored)
    stream.restore(saved)


def file_size(stream: Stream, dtype: str) -> int:
    """Bytes of the state file of a stream."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s.state"
        stream.save(path, dtype=dtype)
        return path.stat().st_size


def measured(bundle: Bundle, ids: NDArray[np.int64], dtype: str, every: int) -> Row:
    """Read the ids by both streams."""
    assert bundle.manifest.tokenizer is not None
    exact, stored = bundle.stream(capsule="none"), bundle.stream(capsule="none")
    size = sum(len(bundle.text.source_bytes(int(token))) for token in ids)
    given = np.concatenate([[bundle.manifest.tokenizer.eos_token_id], ids])
    nats, kl, agreed = [0.0, 0.0], 0.0, 0
    for start in range(0, len(ids), every):
        targets = ids[start : start + every]
        piece = given[start : start + len(targets)]
        p, q = (log_softmax(each.feed(piece, all_logits=True)) for each in (exact, stored))
        for index, rows in enumerate((p, q)):
            nats[index] -= float(rows[np.arange(len(targets)), targets].sum())
        kl += float((np.exp(p) * (p - q)).sum())
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        store(bundle, stored, dtype)
    bits = [nat / math.log(2) / size for nat in nats]
    count = len(ids)
    return Row(dtype, every, bits[1], bits[0], kl / count, agreed / count, file_size(stored, dtype))


def rounding(bundle: Bundle, ids: NDArray[np.int64]) -> tuple[float, float]:
    """KL and agreement between two ways of cutting the ids, with float32 states."""
    logs = []
    for size in (64, 1):
        stream = bundle.stream(capsule="none")
        pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
        logs.append(log_softmax(np.concatenate([stream.feed(p, all_logits=True) for p in pieces])))
    p, q = logs
    agreed = float((p.argmax(-1) == q.argmax(-1)).mean())
    return float((np.exp(p) * (p - q)).sum() / len(ids)), agreed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", help="UTF-8 text, also .xz or .gz")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text")
    parser.add_argument("--every", type=int, nargs="+", default=EVERY, help="tokens")
    parser.add_argument("--variant", help="variant of the bundle")
    options = parser.parse_args()
    bundle = edgelin.load(options.bundle, variant=options.variant, threads=1)
    text = read_text(options.text)[: CHARACTERS * options.tokens]
    ids = np.array(bundle.text.encode(text, start=False)[: options.tokens])
    version = importlib.metadata.version
    print(
        f"{datetime.date.today()}; {platform.machine()}, {platform.system()}; onnxruntime "
        f"{version('onnxruntime')}, numpy {version('numpy')}, edgelin {edgelin.__version__}; "
        f"variant {bundle.variant}, {len(ids)} tokens\n"
    )
    print(f"{HEAD}\n{'| --- ' * 7}|")
    for dtype in state_codec.DTYPES[1:]:
        for every in options.every:
            print(measured(bundle, ids, dtype, every), flush=True)
    stream = bundle.stream(capsule="none")
    stream.feed(ids[:1])
    print(f"\nA float32 state file has {file_size(stream, 'float32'):,} bytes.")
    kl, agreed = rounding(bundle, ids[:4096])
    print(f"Rounding alone: KL {kl:.1e} nat, same first {agreed:.2%}.")


if __name__ == "__main__":
    main()
