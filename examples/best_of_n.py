"""Best of n: read a prompt once, write n continuations of it, keep the likeliest.

A fork copies the state, 1.2 MB in the demo model, whatever has been read: the prompt is read once,
not n times. The score of a continuation is the mean log-probability of its tokens.

    python examples/best_of_n.py bundles/demo "The old house stood at" --n 8
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import edgelin
from edgelin.runtimes.distribution import log_softmax
from edgelin.runtimes.sampler import WINDOW, Sampler, Sampling
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.stream import Stream


@dataclass
class Candidate:
    """A continuation, and the stream that stands behind it, ready to go on."""

    text: str
    score: float
    stream: Stream


def write(bundle: Bundle, prompt: Stream, sampling: Sampling) -> Candidate:
    """One continuation; ``prompt`` stays where it is."""
    stream, sampler = prompt.fork(), Sampler(sampling)
    tokenizer = bundle.manifest.tokenizer
    tokens: list[int] = []
    total = 0.0
    while len(tokens) < sampling.max_tokens:
        assert stream.logits is not None and tokenizer is not None
        token = sampler.choose(stream.logits[0], tokens[-WINDOW:], stream.position)
        if token in tokenizer.ends:
            break
        total += float(log_softmax(stream.logits)[0, token])
        tokens.append(token)
        stream.feed([token])
    text = b"".join(map(bundle.text.token_bytes, tokens)).decode("utf-8", "replace")
    return Candidate(text, total / max(1, len(tokens)), stream)


def best_of(bundle: Bundle, prompt: str, n: int, max_tokens: int, seed: int) -> Candidate:
    """The likeliest of n continuations, drawn with the seeds from ``seed`` on."""
    stream = bundle.stream()
    stream.feed(bundle.text.encode(prompt))
    candidates = [
        write(bundle, stream, Sampling(max_tokens=max_tokens, seed=seed + i)) for i in range(n)
    ]
    return max(candidates, key=lambda candidate: candidate.score)


def main() -> None:
    """Print the best continuation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--n", type=int, default=8, help="continuations")
    parser.add_argument("--max-tokens", type=int, default=40, help="of each")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bundle = edgelin.load(options.bundle)
    best = best_of(bundle, options.prompt, options.n, options.max_tokens, options.seed)
    print(f"{options.prompt}{best.text}\n\nmean log-probability {best.score:.3f} nat a token")


if __name__ == "__main__":
    main()
