"""How much faster a text comes whose tokens are guessed from what was read before (``lookup``).

Each text is written on greedily with and without guesses, in turns; prints medians of the rounds
and of their ratios as a Markdown table, with the share of guessed tokens that were right, and
whether both texts were the same.

    python benchmarks/prompt_lookup.py BUNDLE --threads 1
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import statistics
import time
from pathlib import Path

import edgelin
from edgelin.runtimes import writing
from edgelin.runtimes.session import Bundle

LIST = "".join(f"{n}. The river is {'cold' if n % 2 else 'deep'}.\n" for n in range(1, 7))
TEXTS = {
    "a list, which goes on": LIST,
    "a story, which falls into a loop": "The old house stood at the end of the lane, and",
    "a rhyme three times over": "London Bridge is falling down, my fair lady. " * 3,
    "a story, of which little comes again": "It was a dark night, and",
}
HEAD = "| text | tokens/s | with guesses | ratio | guessed | right | same text |"


def written(bundle: Bundle, text: str, tokens: int, lookup: int) -> tuple[str, float]:
    """The text, and tokens a second once the prompt has been read."""
    stream = bundle.stream(capsule="none")
    ids = bundle.text.encode(text)
    stream.feed(ids)
    begin = time.perf_counter()
    pieces = stream.generate(max_tokens=tokens, temperature=0.0, lookup=lookup)
    found = "".join(pieces)
    return found, (stream.position - len(ids)) / (time.perf_counter() - begin)


def counted(bundle: Bundle, text: str, tokens: int, lookup: int) -> tuple[int, int]:
    """Guessed tokens, and how many of them were right."""
    counts, judge = [0, 0], writing.Guesses.judge

    def note(self: writing.Guesses, guessed: int, right: int) -> None:
        counts[0] += guessed
        counts[1] += right
        judge(self, guessed, right)

    writing.Guesses.judge = note  # type: ignore[method-assign]
    try:
        written(bundle, text, tokens, lookup)
    finally:
        writing.Guesses.judge = judge  # type: ignore[method-assign]
    return counts[0], counts[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=200, help="to write")
    parser.add_argument("--lookup", type=int, default=16, help="tokens of a guess at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    bundle = edgelin.load(options.bundle, threads=options.threads)
    version = importlib.metadata.version
    print(
        f"{datetime.date.today()}; {platform.machine()}, {platform.system()}; onnxruntime "
        f"{version('onnxruntime')}, edgelin {edgelin.__version__}; variant {bundle.variant}, "
        f"{options.threads} threads, {options.tokens} tokens, guesses up to {options.lookup}\n"
    )
    print(f"{HEAD}\n{'| --- ' * 7}|")
    for name, text in TEXTS.items():
        rows = []
        for _ in range(options.rounds):
            (plain, slow), (guessed, fast) = (
                written(bundle, text, options.tokens, lookup) for lookup in (0, options.lookup)
            )
            rows.append((slow, fast, fast / slow))
        slow, fast, ratio = (statistics.median(column) for column in zip(*rows, strict=True))
        total, right = counted(bundle, text, options.tokens, options.lookup)
        same = "yes" if plain == guessed else "no"
        print(f"| {name} | {slow:.0f} | {fast:.0f} | {ratio:.2f} | {total} | {right} | {same} |")


if __name__ == "__main__":
    main()
